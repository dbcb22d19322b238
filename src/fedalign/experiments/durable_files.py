"""Files that survive a power failure: what was written, and that it is there, is on disk before a function returns."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def sync_file(path: Path) -> None:
    """Wait until a file's content is on disk.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.txt"
    >>> _ = path.write_text("kept")
    >>> sync_file(path)
    """
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until a folder's list of names is on disk; a new or renamed file may otherwise be lost.

    >>> sync_folder(Path("."))
    """
    if sys.platform == "win32":
        return  # folders cannot be opened there, and NTFS writes names in order
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Write a text as :func:`~fedalign.experiments.store.write_atomically` does, and wait until it is on disk."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    sync_file(fresh)
    fresh.replace(path)
    sync_folder(path.parent)
