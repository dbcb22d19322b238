"""Reads a folder of ``.npz`` files, one for each client."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedalign.errors import FedalignError, nearest

_KEYS = {"x", "y", "x_heldout", "y_heldout", "x_test", "y_test", "priority"}
_Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]


@dataclass(frozen=True)
class ClientFile:
    """The content of one client's file: its role, and its training, held-out and test samples."""

    name: str
    priority: bool
    train: _Pair
    heldout: _Pair | None
    test: _Pair | None


def read_folder(folder: Path, priority: Sequence[str] | None = None) -> list[ClientFile]:
    """Read all ``.npz`` files of a folder, ordered by name.

    ``priority`` names the priority clients; without it, every file must say whether it is one. Raises
    :class:`FedalignError` for a missing folder, an unknown name or array, or a file that cannot be read.
    """
    if not folder.is_dir():
        raise FedalignError(f"there is no folder {folder}")
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise FedalignError(f"folder {folder} holds no .npz files; each client needs one, with arrays x and y")
    names = {path.stem for path in paths}
    for name in priority or []:
        if name not in names:
            raise FedalignError(f"priority client {name!r} has no file in {folder}; {nearest(name, names)}")
    return [_read(path, priority) for path in paths]


def _read(path: Path, priority: Sequence[str] | None) -> ClientFile:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise FedalignError(f"cannot read {path}: {error}") from error
    for key in arrays:
        if key not in _KEYS:
            raise FedalignError(f"{path} has an unknown array {key!r}; {nearest(key, _KEYS)}")

    def pair(suffix: str) -> _Pair | None:
        x, y = arrays.get(f"x{suffix}"), arrays.get(f"y{suffix}")
        if (x is None) != (y is None):
            raise FedalignError(f"{path} has only one of x{suffix} and y{suffix}; it needs both")
        return None if x is None or y is None else (x, y)

    train = pair("")
    if train is None:
        raise FedalignError(f"{path} has no arrays x and y")
    if priority is None and "priority" not in arrays:
        raise FedalignError(
            f"{path} does not say whether it is a priority client: add an array 'priority', or name the clients"
        )
    if priority is None and arrays["priority"].size != 1:
        raise FedalignError(f"{path}: the array 'priority' must be a single true or false")
    is_priority = path.stem in priority if priority is not None else bool(arrays["priority"].item())
    return ClientFile(path.stem, is_priority, train, pair("_heldout"), pair("_test"))
