"""The image data sets of the paper: where their files come from, where they lie, and what makes them right."""

from __future__ import annotations

import hashlib
import os
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedalign.data.cifar10 import parse_binary, parse_python
from fedalign.data.idx import parse_idx, read_maybe_gzipped
from fedalign.errors import FedalignError

Bytes = npt.NDArray[np.uint8]
Number = float | tuple[float, ...]


@dataclass(frozen=True)
class Remote:
    """A file to download: its name, its md5, and where it can be had."""

    name: str
    md5: str
    urls: tuple[str, ...]


@dataclass(frozen=True)
class Splits:
    """Official training and test images (samples × …, uint8) and labels."""

    x: Bytes
    y: Bytes
    x_test: Bytes
    y_test: Bytes


@dataclass(frozen=True, eq=False)
class Source:
    """A data set. ``md5`` are the checksums of its files' content, unpacked, by the name's end."""

    title: str
    folder: str
    classes: int
    counts: tuple[int, int]  #: training and test samples
    remotes: tuple[Remote, ...]
    read: Callable[[Source, Path], Splits]
    needed: tuple[tuple[str, ...], ...]  #: any one of these lists of files is the whole data set
    mean: Number = 0.0
    std: Number = 1.0
    transposed: bool = False
    md5: Mapping[str, str] = field(default_factory=dict)

    def place(self) -> Path:
        """Give the folder that its files belong in."""
        return data_folder() / self.folder

    def at_hand(self) -> bool:
        """Tell whether its files are there (not whether they are right)."""
        return any(all((self.place() / name).is_file() for name in names) for names in self._alternatives())

    def _alternatives(self) -> tuple[tuple[str, ...], ...]:
        plain = tuple(tuple(name.removesuffix(".gz") for name in names) for names in self.needed)
        return (*self.needed, *plain)

    def load(self) -> Splits:
        """Read and verify it."""
        if not self.at_hand():
            files = ", ".join(self.needed[0])
            raise FedalignError(
                f"{self.title} is not at hand in {self.place()}: get it with `fedalign data get {self.name}`, "
                f"or put {files} there (FEDALIGN_DATA names the folder above){self._other_folders()}"
            )
        splits = self.read(self, self.place())
        check_splits(splits, self.classes, self.place())
        if (len(splits.y), len(splits.y_test)) != self.counts:
            raise FedalignError(
                f"{self.place()} holds {len(splits.y):,} training and {len(splits.y_test):,} test samples, not "
                f"{self.counts[0]:,} and {self.counts[1]:,}: this is not {self.title}"
            )
        return splits

    def _other_folders(self) -> str:
        """Point to other idx files that could be meant, as a part of EMNIST."""
        above, word = self.place().parent, self.folder.partition("-")[0]
        found = sorted(p.parent.name for p in above.glob(f"*{word}*/*train*images*idx3*") if p.parent != self.place())
        return f"; or use what is in {above / found[0]}: --set data.folder={found[0]}" if found else ""

    @property
    def name(self) -> str:
        """The name that experiments use."""
        return next(name for name, source in SOURCES.items() if source is self)


def data_folder() -> Path:
    """Give the folder of all data sets: ``FEDALIGN_DATA``, or ``fedalign`` in the user's cache."""
    named = os.environ.get("FEDALIGN_DATA")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedalign"


def check_splits(splits: Splits, classes: int | None, where: Path) -> None:
    """Refuse images and labels that don't belong together."""
    for what, x, y in (("training", splits.x, splits.y), ("test", splits.x_test, splits.y_test)):
        if len(x) != len(y) or not len(y):
            raise FedalignError(
                f"{where} holds {len(x):,} {what} images and {len(y):,} labels; they don't belong together"
            )
        if classes is not None and int(y.max()) >= classes:
            raise FedalignError(f"{where} has the {what} label {int(y.max())}, but there are {classes} classes")
    if splits.x.shape[1:] != splits.x_test.shape[1:]:
        raise FedalignError(f"{where}: training images are {splits.x.shape[1:]}, test images {splits.x_test.shape[1:]}")


def read_idx_folder(folder: Path, expected: Source | None = None) -> Splits:
    """Read a folder of four idx files, found by what is in their names: train or test (t10k), images or labels."""
    if not folder.is_dir():
        raise FedalignError(f"there is no folder {folder}")

    def one(part: str, kind: str, dimensions: int) -> Bytes:
        words = ("test", "t10k") if part == "test" else ("train",)
        found = sorted(
            path
            for path in folder.iterdir()
            if kind in path.name
            and any(word in path.name for word in words)
            and "idx" in path.name
            and not path.name.endswith(".part")
        )
        if not found:
            raise FedalignError(
                f"{folder} has no idx file of {part} {kind} (as {words[-1]}-{kind}-idx{dimensions}-ubyte.gz)"
            )
        content = read_maybe_gzipped(found[0])
        data = parse_idx(content, dimensions, found[0])
        if expected is not None:
            _check_md5(content, expected, found[0])
        return data

    return Splits(
        one("train", "images", 3), one("train", "labels", 1), one("test", "images", 3), one("test", "labels", 1)
    )


def _check_md5(content: bytes, source: Source, path: Path) -> None:
    wanted = next((md5 for end, md5 in source.md5.items() if path.name.removesuffix(".gz").endswith(end)), None)
    if wanted is not None and hashlib.md5(content, usedforsecurity=False).hexdigest() != wanted:
        raise FedalignError(f"{path} does not hold the official content of {source.title}; delete it and get it again")


def _read_idx(source: Source, folder: Path) -> Splits:
    return read_idx_folder(folder, source)


def _read_emnist(source: Source, folder: Path) -> Splits:
    """Read EMNIST's balanced split from the official archive, or from its four files."""
    archive = folder / "gzip.zip"
    if not archive.is_file():
        return read_idx_folder(folder, source)

    def one(part: str, kind: str, dimensions: int) -> Bytes:
        import gzip
        import zlib

        name = f"gzip/emnist-balanced-{part}-{kind}-idx{dimensions}-ubyte.gz"
        try:
            with zipfile.ZipFile(archive) as opened:
                return parse_idx(gzip.decompress(opened.read(name)), dimensions, archive / name)
        except (zipfile.BadZipFile, KeyError, EOFError, zlib.error, OSError) as error:
            raise FedalignError(f"{archive} is damaged ({error}); delete it and get it again") from error

    return Splits(
        one("train", "images", 3), one("train", "labels", 1), one("test", "images", 3), one("test", "labels", 1)
    )


_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def _read_cifar10(source: Source, folder: Path) -> Splits:
    """Read the binary or the Python version, unpacked or in its archive; both have the same content."""
    parts = []
    for batch in _BATCHES:
        content, path, binary = _cifar10_batch(folder, batch)
        x, y = (parse_binary if binary else parse_python)(content, path)
        if not binary:
            content = np.concatenate([y[:, None], x.reshape(len(y), -1)], axis=1).tobytes()
        wanted = source.md5.get(batch)
        if wanted is not None and hashlib.md5(content, usedforsecurity=False).hexdigest() != wanted:
            raise FedalignError(f"{path} does not hold the official content of {batch}; delete it and get it again")
        parts.append((x, y))
    return Splits(np.concatenate([x for x, _ in parts[:-1]]), np.concatenate([y for _, y in parts[:-1]]), *parts[-1])


def _cifar10_batch(folder: Path, batch: str) -> tuple[bytes, Path, bool]:
    for inner, name, binary in (
        ("cifar-10-batches-bin", f"{batch}.bin", True),
        ("cifar-10-batches-py", batch, False),
    ):
        for path in (folder / name, folder / inner / name):
            if path.is_file():
                try:
                    return path.read_bytes(), path, binary
                except OSError as error:
                    raise FedalignError(f"cannot read {path}: {error.strerror}") from error
        archive = folder / ("cifar-10-binary.tar.gz" if binary else "cifar-10-python.tar.gz")
        if archive.is_file():
            try:
                with tarfile.open(archive) as opened:
                    member = opened.extractfile(f"{inner}/{name}")
                    if member is None:
                        raise KeyError(name)
                    return member.read(), archive / name, binary
            except (tarfile.TarError, KeyError, EOFError, OSError) as error:
                raise FedalignError(f"{archive} is damaged ({error}); delete it and get it again") from error
    raise FedalignError(f"{folder} lacks CIFAR-10's {batch}; get it with `fedalign data get cifar10`")


def _mirrored(name: str, md5: str, *bases: str) -> Remote:
    return Remote(name, md5, tuple(base + name for base in bases))


_FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
)
_IDX = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))

SOURCES: dict[str, Source] = {
    "fmnist": Source(
        title="Fashion-MNIST",
        folder="fashion-mnist",
        classes=10,
        counts=(60_000, 10_000),
        remotes=tuple(
            _mirrored(name, md5, *_FASHION)
            for name, md5 in zip(
                _IDX,
                (
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    "25c81989df183df01b3e8a0aad5dffbe",
                    "bef4ecab320f06d8554ea6380940ec79",
                    "bb300cfdad3c16e7a12a480ee83cd310",
                ),
                strict=True,
            )
        ),
        read=_read_idx,
        needed=(_IDX,),
        md5={
            "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
            "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
            "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
        },
    ),
    "emnist": Source(
        title="EMNIST (balanced)",
        folder="emnist",
        classes=47,
        counts=(112_800, 18_800),
        remotes=(
            _mirrored("gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e", "https://biometrics.nist.gov/cs_links/EMNIST/"),
        ),
        read=_read_emnist,
        needed=(
            ("gzip.zip",),
            tuple(
                f"emnist-balanced-{part}-{kind}-ubyte.gz"
                for part in ("train", "test")
                for kind in ("images-idx3", "labels-idx1")
            ),
        ),
        transposed=True,
    ),
    "cifar10": Source(
        title="CIFAR-10",
        folder="cifar-10",
        classes=10,
        counts=(50_000, 10_000),
        remotes=(
            _mirrored(
                "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", "https://www.cs.toronto.edu/~kriz/"
            ),
        ),
        read=_read_cifar10,
        needed=(
            ("cifar-10-binary.tar.gz",),
            ("cifar-10-python.tar.gz",),
            tuple(f"{batch}.bin" for batch in _BATCHES),
            tuple(f"cifar-10-batches-bin/{batch}.bin" for batch in _BATCHES),
            _BATCHES,
            tuple(f"cifar-10-batches-py/{batch}" for batch in _BATCHES),
        ),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        md5={
            "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
    ),
}
