"""The server's log in the run's folder: what ``flwr log`` shows of the run, kept in files of limited size."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

from fedalign.monitoring.words import printable

NAME = "server.log"
LARGEST, KEEP = 10 << 20, 5  #: bytes of a file, and how many older ones are kept as ``server.log.1`` and so on
log = logging.getLogger("flwr")


class _Lines(logging.Formatter):
    """Writes a record as one line with the time in UTC; a stranger's text cannot add lines or control characters."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return f"{when} {record.levelname} {printable(record.getMessage())}"


@contextlib.contextmanager
def server_log(folder: Path) -> Iterator[None]:
    """Keep what Flower's logger says in a file of the folder while a ``with`` block lasts, and the error that ends it.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with server_log(folder):
    ...     log.warning("site-3 is left out: %s", "\\x1b[2J")
    >>> (folder / NAME).read_text().split(maxsplit=1)[1]
    'WARNING site-3 is left out: ?[2J\\n'
    """
    handler = RotatingFileHandler(folder / NAME, maxBytes=LARGEST, backupCount=KEEP, encoding="utf-8")
    handler.setFormatter(_Lines())
    handler.setLevel(logging.INFO)  # Flower says more, about itself
    log.addHandler(handler)
    try:
        yield
    except Exception as error:
        # The caller's log shows it once the run has ended, when this file is closed.
        handler.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, "%s", (error,), None))
        raise
    finally:
        log.removeHandler(handler)
        handler.close()
