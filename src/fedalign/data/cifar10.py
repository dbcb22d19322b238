"""CIFAR-10's two official forms: the binary version, and the pickled one for Python."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedalign.errors import FedalignError

Bytes = npt.NDArray[np.uint8]
_RECORD = 1 + 3 * 32 * 32
#: The only things that the official pickles name; anything else is refused, not run.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): lambda text, _: text.encode("latin-1"),  # how Python 3 writes bytes for Python 2
}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _ALLOWED[module, name]


def parse_binary(content: bytes, path: Path) -> tuple[Bytes, Bytes]:
    """Read images (n × 3 × 32 × 32) and labels from records of a label and a picture."""
    if not content or len(content) % _RECORD:
        raise FedalignError(
            f"{path} has {len(content)} bytes, not a whole number of {_RECORD}-byte records; delete it and get it again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def parse_python(content: bytes, path: Path) -> tuple[Bytes, Bytes]:
    """Read images and labels from a pickled batch, without running anything that it might hold."""
    try:
        table = _Plain(io.BytesIO(content), encoding="bytes").load()
        images, labels = np.asarray(table[b"data"], np.uint8), np.asarray(table[b"labels"], np.uint8)
        return images.reshape(len(labels), 3, 32, 32), labels
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FedalignError(f"{path} is not a CIFAR-10 batch ({error}); delete it and get it again") from error
