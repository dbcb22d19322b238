"""The audit log of a run: who changed what, and when. Lines are only ever added, and each is on disk when it is said.

``audit.jsonl`` in the run's folder has one JSON object a line: ``time``, ``event``, ``round``, ``client`` and
``details``. docs/outputs.md lists the events.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedalign.experiments.durable_files import sync_folder
from fedalign.monitoring.audit import NAME, read
from fedalign.monitoring.rotation import rotate

__all__ = ["LARGEST", "NAME", "AuditLog", "read"]

LARGEST = 10 << 20  #: bytes of a file of the log


class AuditLog:
    """Adds events to the audit log of a run's folder.

    ``round`` is the round that is under way, from 0, and None before the first.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> audit = AuditLog(folder)
    >>> audit.add("role_changed", "site-3", was="free", now="priority")
    >>> [(event["event"], event["client"], event["details"]) for event in read(folder)]
    [('role_changed', 'site-3', {'was': 'free', 'now': 'priority'})]
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self.round: int | None = None

    def add(self, event: str, client: str | None = None, /, **details: Any) -> None:
        """Write an event. It is on disk when this returns; a folder or disk that cannot be written raises OSError."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        row = {"time": now, "event": event, "round": self.round, "client": client, "details": details}
        line = json.dumps(row, default=str) + "\n"
        rotate(self._path, largest=LARGEST)  # all older files are kept
        is_new = not self._path.exists()
        with self._path.open("ab+") as file:
            if not is_new and not _ends_whole(file):
                line = "\n" + line  # a kill cut the last line short: it stays as it is, on a line of its own
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_folder(self._path.parent)


def _ends_whole(file: Any) -> bool:
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")
