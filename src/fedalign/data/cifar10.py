"""Reads the two official versions of CIFAR-10: the binary one, and the one of Python pickles."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from fedalign.data.source import Bytes, Source, Splits
from fedalign.errors import FedalignError

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_RECORD = 1 + 3 * 32 * 32
# The only objects that the official pickles refer to. Anything else is refused, because a pickle can run code.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): lambda text, _: text.encode("latin-1"),  # how Python 3 writes bytes for Python 2
}


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return _ALLOWED[module, name]


def read_cifar10(source: Source, folder: Path) -> Splits:
    """Read either version, extracted or in its archive; both have the same content and the same checksums."""
    parts = []
    for batch in BATCHES:
        content, path, binary = _read_batch(folder, batch)
        x, y = (parse_binary if binary else parse_python)(content, path)
        if not binary:
            content = np.concatenate([y[:, None], x.reshape(len(y), -1)], axis=1).tobytes()
        source.verify(content, batch, path)
        parts.append((x, y))
    return Splits(np.concatenate([x for x, _ in parts[:-1]]), np.concatenate([y for _, y in parts[:-1]]), *parts[-1])


def parse_binary(content: bytes, path: Path) -> tuple[Bytes, Bytes]:
    """Return the images (n × 3 × 32 × 32) and labels of a binary batch; ``path`` is only for error messages."""
    if not content or len(content) % _RECORD:
        raise FedalignError(
            f"{path} has {len(content)} bytes, not a whole number of {_RECORD}-byte records; "
            "delete it and download it again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def parse_python(content: bytes, path: Path) -> tuple[Bytes, Bytes]:
    """Return the images and labels of a pickled batch, without running code that the pickle might contain."""
    try:
        table = _SafeUnpickler(io.BytesIO(content), encoding="bytes").load()
        images, labels = np.asarray(table[b"data"], np.uint8), np.asarray(table[b"labels"], np.uint8)
        return images.reshape(len(labels), 3, 32, 32), labels
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FedalignError(f"{path} is not a CIFAR-10 batch ({error}); delete it and download it again") from error


def _read_batch(folder: Path, batch: str) -> tuple[bytes, Path, bool]:
    """Find a batch; return its content, its path, and whether it is binary."""
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
                raise FedalignError(f"{archive} is damaged ({error}); delete it and download it again") from error
    raise FedalignError(f"{folder} lacks {batch} of CIFAR-10; download it with `fedalign data get cifar10`")
