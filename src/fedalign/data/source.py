"""An image data set with official files: where they are stored, how they are read, and how they are verified."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedalign.errors import FedalignError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Remote:
    """A file to download: its name, its MD5 checksum, and the addresses that serve it, tried in this order."""

    name: str
    md5: str
    urls: tuple[str, ...]


@dataclass(frozen=True)
class Splits:
    """The official training and test images (samples × …, uint8) with their labels."""

    x: Bytes
    y: Bytes
    x_test: Bytes
    y_test: Bytes


@dataclass(frozen=True, eq=False)
class Source:
    """An image data set: its files, and what its content must be.

    ``read`` reads the files from a folder. ``md5`` maps the end of a file's name to the checksum of its content after
    decompression.
    """

    name: str  #: as experiments write it
    title: str
    folder: str  #: relative to :func:`data_folder`
    classes: int
    counts: tuple[int, int]  #: training and test samples
    remotes: tuple[Remote, ...]
    read: Callable[[Source, Path], Splits]
    needed: tuple[tuple[str, ...], ...]  #: alternatives: each lists the files of a complete data set
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0
    transposed: bool = False
    md5: Mapping[str, str] = field(default_factory=dict)

    def place(self) -> Path:
        """Return the folder in which the data set's files are stored."""
        return data_folder() / self.folder

    def available(self) -> bool:
        """Tell whether the data set's files exist; their content is not checked."""
        plain = tuple(tuple(name.removesuffix(".gz") for name in names) for names in self.needed)
        return any(all((self.place() / name).is_file() for name in names) for names in (*self.needed, *plain))

    def load(self) -> Splits:
        """Read the data set and verify its content; a :class:`FedalignError` says what is missing or wrong."""
        if not self.available():
            files = ", ".join(self.needed[0])
            raise FedalignError(
                f"{self.title} is not in {self.place()}: download it with `fedalign data get {self.name}`, "
                f"or put {files} there (FEDALIGN_DATA names the parent folder){self._other_folders()}"
            )
        splits = self.read(self, self.place())
        check_splits(splits, self.classes, self.place())
        if (len(splits.y), len(splits.y_test)) != self.counts:
            raise FedalignError(
                f"{self.place()} holds {len(splits.y):,} training and {len(splits.y_test):,} test samples, not "
                f"{self.counts[0]:,} and {self.counts[1]:,}: this is not {self.title}"
            )
        return splits

    def verify(self, content: bytes, name: str, path: Path) -> None:
        """Refuse content whose checksum differs from the official one; ``path`` is only for the message.

        A ``name`` without an official checksum passes.
        """
        wanted = next((md5 for end, md5 in self.md5.items() if name.endswith(end)), None)
        if wanted is not None and hashlib.md5(content, usedforsecurity=False).hexdigest() != wanted:
            raise FedalignError(
                f"{path} does not hold the official content of {self.title}; delete it and download it again"
            )

    def _other_folders(self) -> str:
        """Suggest a folder with similar idx files, such as a part of EMNIST, if there is one."""
        above, word = self.place().parent, self.folder.partition("-")[0]
        found = sorted(p.parent.name for p in above.glob(f"*{word}*/*train*images*idx3*") if p.parent != self.place())
        return f"; or use the files in {above / found[0]} with --set data.folder={found[0]}" if found else ""


def data_folder() -> Path:
    """Return the folder of all data sets: ``FEDALIGN_DATA``, or ``fedalign`` in the user's cache folder."""
    named = os.environ.get("FEDALIGN_DATA")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedalign"


def check_splits(splits: Splits, classes: int | None, where: Path) -> None:
    """Refuse images and labels that do not fit together; ``where`` is only for the message."""
    for what, x, y in (("training", splits.x, splits.y), ("test", splits.x_test, splits.y_test)):
        if len(x) != len(y) or not len(y):
            raise FedalignError(f"{where} holds {len(x):,} {what} images and {len(y):,} labels; they must be as many")
        if classes is not None and int(y.max()) >= classes:
            raise FedalignError(f"{where} has the {what} label {int(y.max())}, but there are {classes} classes")
    if splits.x.shape[1:] != splits.x_test.shape[1:]:
        raise FedalignError(f"{where}: training images are {splits.x.shape[1:]}, test images {splits.x_test.shape[1:]}")
