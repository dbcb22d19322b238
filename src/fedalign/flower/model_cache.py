"""Models that a node keeps on disk by their hash, so that the server need not send them again.

Every message runs in a process of its own, so the cache is a folder. It is private to the node's user, and limited: the
models that were not used for the longest time are removed first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch


def digest(model: torch.Tensor) -> str:
    """Return a SHA-256 of a model's numbers: equal models have equal digests."""
    return hashlib.sha256(model.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def is_digest(name: str) -> bool:
    """Say whether a name can be that of a model: 64 hexadecimal digits, which no path is.

    >>> is_digest("a" * 64), is_digest("../" + "a" * 61)
    (True, False)
    """
    return re.fullmatch("[0-9a-f]{64}", name) is not None


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the cache: ``FEDALIGN_CACHE``, that of systemd's ``CacheDirectory``, or the user's own.

    >>> str(cache_folder({"FEDALIGN_CACHE": "/srv/fedalign"}))
    '/srv/fedalign/models'
    """
    if given := environment.get("FEDALIGN_CACHE"):
        base = Path(given).expanduser()
    elif given := environment.get("CACHE_DIRECTORY"):
        base = Path(given.split(":")[0])
    else:
        base = Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedalign"
    return base / "models"


class ModelCache:
    """The models of a folder, of ``limit`` bytes in total at most; 0: none. A folder that cannot be used keeps nothing.

    Names come from the server's messages. One that is no digest is that of no model, and is never made a path.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = ModelCache(Path(folder) / "models", limit=1000)
    ...     cache.put(digest(torch.ones(3)), torch.ones(3))
    ...     cache.get(digest(torch.ones(3)), torch.float32)
    tensor([1., 1., 1.])
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a model by its digest; None if it is not there, damaged, or of another type."""
        path = self._folder / name
        if not self._limit or not is_digest(name):
            return None
        try:
            data = _read(path, self._limit)
            if data is None:
                return None
            os.utime(path)
            if hashlib.sha256(data).hexdigest() != name:
                path.unlink(missing_ok=True)
                return None
        except OSError:
            return None
        if len(data) % dtype.itemsize:
            return None
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)

    def put(self, name: str, model: torch.Tensor) -> None:
        """Keep a model under its digest, and remove others if they are too many; a full disk is no error."""
        data = model.detach().cpu().contiguous().view(torch.uint8).numpy().data
        if not is_digest(name) or len(data) > self._limit or not self._usable():
            return
        path = self._folder / name
        if path.is_file() and not path.is_symlink():
            return
        with contextlib.suppress(OSError):
            number, temporary = tempfile.mkstemp(dir=self._folder, prefix=".")
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(data)
                Path(temporary).replace(path)
            except OSError:
                Path(temporary).unlink(missing_ok=True)
                raise
            self._trim()

    def _usable(self) -> bool:
        """Make the folder, and say whether it is this user's alone."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self._folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                return False
            if found.st_mode & 0o077:
                self._folder.chmod(0o700)
        except OSError:
            return False
        return True

    def _trim(self) -> None:
        files = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another message's process has removed it
                found = path.stat()
                files.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._limit:
                return
            path.unlink(missing_ok=True)
            total -= size


def _read(path: Path, limit: int) -> bytearray | None:
    """Return the bytes of a file; None if it is no regular file, as a link and a device are not, or too large.

    A device could be read without end, and opening a pipe would wait for a writer.
    """
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as file:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            return None
        return bytearray(file.read(found.st_size))
