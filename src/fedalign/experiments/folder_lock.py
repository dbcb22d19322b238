"""The lock of an output folder: one process at a time writes it.

The operating system holds the lock and gives it back when the process ends, however it ends: a killed process blocks
nobody. The file's content is only for the message to a second process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
import warnings
from datetime import datetime
from pathlib import Path
from types import TracebackType

from fedalign.errors import FedalignError, FederationWarning

NAME = ".fedalign-lock"  #: the file in the folder, which is there only while the folder is written
_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
_BUSY = {errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK, errno.EDEADLK}
_WINDOWS_BYTE = 1 << 20  # the byte that is locked on Windows, far behind the content, which others read

#: by folder: the thread that holds its lock in this process, how often it has entered it, and the open file
_held: dict[Path, tuple[int, int, int]] = {}
_guard = threading.Lock()


class FolderLock:
    """Holds a folder while a ``with`` block lasts. Makes the folder if it is missing, and removes it if it stays empty.

    The thread that holds a folder may enter it again; another thread or process gets a :class:`FedalignError` at once,
    which names the process that holds it. On a file system without locks a warning says that nothing is locked.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "out"
    >>> with FolderLock(folder):
    ...     [path.name for path in folder.iterdir()]
    ['.fedalign-lock']
    >>> folder.exists()
    False
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = Path()
        self._made: list[Path] = []
        self._entered = False  # by this object

    def __enter__(self) -> FolderLock:
        if not self._entered:
            self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock; raises :class:`FedalignError` if another process or thread has it."""
        if self.folder.exists() and not self.folder.is_dir():
            raise FedalignError(f"{self.folder} is a file, where an output folder is needed")
        self._key = self.folder.resolve()
        with _guard:
            owner, depth, descriptor = _held.get(self._key, (threading.get_ident(), 0, -1))
            if owner != threading.get_ident():
                raise self._refusal()
            if depth == 0:
                try:
                    descriptor = self._open_and_lock()
                except OSError as error:
                    self._remove_empty_folders()
                    raise FedalignError(f"cannot write to {self.folder}: {error.strerror}") from error
            _held[self._key] = owner, depth + 1, descriptor
            self._entered = True

    def release(self) -> None:
        """Give the lock back, if this object has it; folders that were made for it and are empty are removed."""
        with _guard:
            if not self._entered:
                return
            self._entered = False
            owner, depth, descriptor = _held[self._key]
            if depth > 1:
                _held[self._key] = owner, depth - 1, descriptor
                return
            del _held[self._key]
            with contextlib.suppress(OSError):  # before the lock is given back, or it could be the next one's file
                (self.folder / NAME).unlink()
            os.close(descriptor)
            self._remove_empty_folders()

    def _open_and_lock(self) -> int:
        while True:
            self._make_folder()
            path = self.folder / NAME
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if not _lock(descriptor):
                    raise self._refusal()
                if _is_same_file(descriptor, path):  # else its holder removed the file just now
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, _holder().encode())
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _make_folder(self) -> None:
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            self._made.append(path)

    def _remove_empty_folders(self) -> None:
        with contextlib.suppress(OSError):  # where something has been written they stay
            while self._made:
                self._made.pop().rmdir()

    def _refusal(self) -> FedalignError:
        self._made.clear()
        return FedalignError(
            f"{self.folder} is being written by {_described(self.folder / NAME)}; "
            "wait until it has ended, or choose another folder"
        )


def _holder() -> str:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n"


def _described(path: Path) -> str:
    """Name the process in a lock file; its holder may be about to write it."""
    for _ in range(20):
        try:
            found = json.loads(path.read_bytes())
            return f"process {found['pid']} on {found['host']} since {found['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            time.sleep(0.01)
    return "another process"


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int) -> bool:
    """Take the operating system's lock, without waiting; False if another has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, _WINDOWS_BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        if error.errno not in _UNSUPPORTED:
            raise
        warnings.warn(
            "this file system has no locks, so nothing keeps a second process from writing the same folder",
            FederationWarning,
            stacklevel=2,
        )
    return True
