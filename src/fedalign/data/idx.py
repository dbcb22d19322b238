"""Reads the idx format of MNIST and similar data sets: a magic number, the sizes, then bytes; plain or gzipped."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from fedalign.data.source import Bytes, Source, Splits
from fedalign.errors import FedalignError

_KINDS = {3: "images", 1: "labels"}


def read_idx_folder(folder: Path, source: Source | None = None) -> Splits:
    """Read the four idx files of a folder: images and labels, for training and test.

    A file is recognised by its name, which must contain ``idx``, ``images`` or ``labels``, and ``train``, ``test`` or
    ``t10k``. With a ``source``, every file must have the official content.
    """
    if not folder.is_dir():
        raise FedalignError(f"there is no folder {folder}")

    def read(part: str, kind: str, dimensions: int) -> Bytes:
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
                f"{folder} has no idx file of {part} {kind}, such as {words[-1]}-{kind}-idx{dimensions}-ubyte.gz"
            )
        content = read_maybe_gzipped(found[0])
        data = parse_idx(content, dimensions, found[0])
        if source is not None:
            source.verify(content, found[0].name.removesuffix(".gz"), found[0])
        return data

    return Splits(
        read("train", "images", 3), read("train", "labels", 1), read("test", "images", 3), read("test", "labels", 1)
    )


def read_maybe_gzipped(path: Path) -> bytes:
    """Return the content of a file, decompressed if it is gzipped."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FedalignError(f"{path} is damaged or incomplete ({error}); delete it and download it again") from error
    except OSError as error:
        raise FedalignError(f"cannot read {path}: {error.strerror or error}") from error


def parse_idx(content: bytes, dimensions: int, path: Path) -> Bytes:
    """Return the array in the content of an idx file: images (3 dimensions) or labels (1).

    ``path`` is only for error messages.
    """
    start = 4 + 4 * dimensions
    if len(content) < start or content[:3] != b"\x00\x00\x08":
        raise FedalignError(f"{path} is not an idx file of bytes; delete it and download it again")
    if content[3] != dimensions:
        held = _KINDS.get(content[3], f"{content[3]}-dimensional data")
        raise FedalignError(f"{path} holds {held}, not {_KINDS[dimensions]}: were the files swapped?")
    shape = tuple(int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
    if len(content) - start != math.prod(shape):
        size = " × ".join(str(side) for side in shape)
        raise FedalignError(
            f"{path} must hold {size} bytes but has {len(content) - start}; delete it and download it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
