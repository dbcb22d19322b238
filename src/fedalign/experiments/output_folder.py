"""The default output folders, ``runs/NAME``, ``runs/NAME-2`` and so on."""

from __future__ import annotations

from pathlib import Path

from fedalign.errors import FedalignError
from fedalign.experiments.folder_lock import FolderLock


def free_folder(name: str, parent: Path = Path("runs")) -> Path:
    """Choose ``runs/NAME``, or ``runs/NAME-2`` and so on if that is taken."""
    candidate, number = parent / name, 1
    while candidate.exists():
        number += 1
        candidate = parent / f"{name}-{number}"
    return candidate


def latest_folder(name: str, parent: Path = Path("runs")) -> Path:
    """Find the newest folder that :func:`free_folder` gave for this name."""
    candidate, number = parent / name, 1
    while (following := parent / f"{name}-{number + 1}").exists():
        candidate, number = following, number + 1
    return candidate


def locked_folder(given: Path | None, name: str, resume: bool) -> FolderLock:
    """Lock the output folder of a command, for the rest of the command; a ``with`` block gives it back.

    ``given`` is the user's choice. Without one it is the newest folder of the name to resume, else a free one. Two
    processes that start at the same moment never get the same free one.
    """
    if given is not None or resume:
        lock = FolderLock(given or latest_folder(name))
        lock.acquire()
        return lock
    while True:
        lock = FolderLock(free_folder(name))
        try:
            lock.acquire()
        except FedalignError:
            if not lock.folder.exists():
                raise
        else:
            return lock
