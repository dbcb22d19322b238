"""The idx format of MNIST and its kin: a magic number, the sizes, then bytes; plain or gzipped."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedalign.errors import FedalignError

Bytes = npt.NDArray[np.uint8]
_KINDS = {3: "images", 1: "labels"}


def read_idx(path: Path, dimensions: int) -> Bytes:
    """Read images (3 dimensions) or labels (1) from an idx file."""
    return parse_idx(read_maybe_gzipped(path), dimensions, path)


def read_maybe_gzipped(path: Path) -> bytes:
    """Read a file's content, unpacked if it is gzipped."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FedalignError(f"{path} is damaged or cut off ({error}); delete it and get it again") from error
    except OSError as error:
        raise FedalignError(f"cannot read {path}: {error.strerror or error}") from error


def parse_idx(content: bytes, dimensions: int, path: Path) -> Bytes:
    """Read the bytes of an idx file; ``path`` is for messages."""
    start = 4 + 4 * dimensions
    if len(content) < start or content[:3] != b"\x00\x00\x08":
        raise FedalignError(f"{path} is not an idx file of bytes; delete it and get it again")
    if content[3] != dimensions:
        held = _KINDS.get(content[3], f"{content[3]}-dimensional data")
        raise FedalignError(f"{path} holds {held}, not {_KINDS[dimensions]}: were the files swapped?")
    shape = tuple(int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
    if len(content) - start != math.prod(shape):
        size = " × ".join(str(side) for side in shape)
        raise FedalignError(
            f"{path} says it holds {size} bytes and has {len(content) - start}; delete it and get it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
