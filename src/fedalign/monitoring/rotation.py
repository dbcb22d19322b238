"""Rotates logs by size: ``log`` becomes ``log.1``, that becomes ``log.2``, and so on. Lines are never cut."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path


def rotate(path: Path, *, largest: int, keep: int | None = None, youngest: float = 0.0) -> None:
    """Make room if a log has at least ``largest`` bytes.

    At most ``keep`` older files stay, all if it is None. One that was written in the last ``youngest`` seconds stays
    in any case: whoever makes a log grow must not be able to empty it.

    >>> import tempfile
    >>> log = Path(tempfile.mkdtemp()) / "node.jsonl"
    >>> for line in ("first", "second", "third"):
    ...     rotate(log, largest=5, keep=1)
    ...     _ = log.write_text(line)
    >>> [file.read_text() for file in files(log)]
    ['second', 'third']
    """
    if not path.exists() or path.stat().st_size < largest:
        return
    older = _numbered(path)
    for number in sorted(older, reverse=True):
        old = older[number]
        if keep is not None and number >= keep and time.time() - old.stat().st_mtime >= youngest:
            old.unlink()
        else:
            old.rename(path.with_name(f"{path.name}.{number + 1}"))
    path.rename(path.with_name(f"{path.name}.1"))


def files(path: Path, since: float = 0.0) -> list[Path]:
    """List a log's files, oldest first, without those that were last written before ``since`` (seconds since 1970)."""
    older = _numbered(path)
    found = [older[number] for number in sorted(older, reverse=True)]
    return [file for file in [*found, path] if file.exists() and file.stat().st_mtime >= since]


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a log while a ``with`` block lasts, so that two processes do not rotate it at once; waits for the other.

    On Windows, and for a reader who may not write there, nothing is held.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    try:
        descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_WRONLY | os.O_CREAT, 0o600)
    except PermissionError:
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _numbered(path: Path) -> dict[int, Path]:
    """Return the older files by their numbers."""
    pattern = re.compile(re.escape(path.name) + r"\.([1-9][0-9]*)")
    found = path.parent.iterdir() if path.parent.is_dir() else ()
    return {int(match[1]): file for file in found if (match := pattern.fullmatch(file.name))}
