"""Reads a folder with one file for each client: ``.npz``, ``.csv`` or ``.parquet``."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedalign.data import tables
from fedalign.data.clients import Pair, Parts, Reading, read_clients
from fedalign.data.roles import priority_flags
from fedalign.errors import FedalignError, nearest

_KEYS = {"x", "y", "x_heldout", "y_heldout", "x_test", "y_test", "priority"}
_SUFFIXES = (".npz", *tables.SUFFIXES)
_FURTHER = ("heldout", "test")  # sub-folders


def read_folder(
    folder: Path, reading: Reading, priority: Sequence[str] | str | None = None
) -> tuple[Parts, dict[str, bool]]:
    """Read all clients of a folder, in the order of their names, and tell which of them are priority clients.

    A client's file is called ``NAME.npz``, ``NAME.csv`` or ``NAME.parquet``. Sub-folders ``heldout`` and ``test`` may
    hold a client's further samples, in a file of the same name. ``priority`` names the priority clients; without it,
    every file must say whether it is one, as ``.npz`` files can. Raises :class:`FedalignError` for a missing folder,
    an unknown name, array or column, and for a file that cannot be read.
    """
    paths = _files(folder)
    if not paths:
        raise FedalignError(
            f"folder {folder} holds no .npz, .csv or .parquet files; each client needs one (an .npz file with arrays "
            "x and y)"
        )
    further = {part: _files(folder / part) if (folder / part).is_dir() else {} for part in _FURTHER}
    for files in further.values():
        for name, path in files.items():
            if name not in paths:
                raise FedalignError(f"{path} belongs to no client: there is no {name} in {folder}")
    archives = {name: _arrays(path) for name, path in paths.items() if path.suffix == ".npz"}
    data = {name: _pair(paths[name], archives[name], "") if name in archives else path for name, path in paths.items()}
    more: dict[str, dict[str, Any]] = {}
    for part, files in further.items():
        own = {name: _pair(paths[name], arrays, f"_{part}") for name, arrays in archives.items()}
        found = {name: pair for name, pair in own.items() if pair is not None}
        more[part] = found | {name: _content(path) for name, path in files.items()}
    for name, pair in data.items():
        if pair is None:
            raise FedalignError(f"{paths[name]} has no arrays x and y")
    flags = _flags(paths, archives, priority)
    return read_clients(data, reading, more["heldout"] or None, more["test"] or None), flags


def _files(folder: Path) -> dict[str, Path]:
    """List the clients' files of a folder by name."""
    if not folder.is_dir():
        if folder.is_file():
            raise FedalignError(
                f"{folder} is one table: name the column that tells clients apart, as in client = 'site'"
            )
        raise FedalignError(f"there is no folder {folder}")
    found: dict[str, Path] = {}
    for path in sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file()):
        if path.stem in found:
            raise FedalignError(f"{found[path.stem]} and {path} are files of one client; keep one of them")
        found[path.stem] = path
    return dict(sorted(found.items()))


def _flags(
    paths: dict[str, Path], archives: dict[str, dict[str, npt.NDArray[Any]]], priority: Sequence[str] | str | None
) -> dict[str, bool]:
    if priority is not None:
        return dict(zip(paths, priority_flags(priority, list(paths)), strict=True))
    flags = {}
    for name, path in paths.items():
        flag = archives.get(name, {}).get("priority")
        if flag is None:
            how = "add an array 'priority', or name" if path.suffix == ".npz" else "name"
            raise FedalignError(
                f"{path} does not say whether it is a priority client: {how} the clients, as in priority = ['{name}']"
            )
        if flag.size != 1:
            raise FedalignError(f"{path}: the array 'priority' must be a single true or false")
        flags[name] = bool(flag.item())
    return flags


def _content(path: Path) -> Any:
    """Return a client's further samples: arrays, or the path of a table."""
    if path.suffix != ".npz":
        return path
    pair = _pair(path, _arrays(path), "")
    if pair is None:
        raise FedalignError(f"{path} has no arrays x and y")
    return pair


def _arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise FedalignError(f"cannot read {path}: {error}") from error
    for key in arrays:
        if key not in _KEYS:
            raise FedalignError(f"{path} has an unknown array {key!r}; {nearest(key, _KEYS)}")
    return arrays


def _pair(path: Path, arrays: dict[str, npt.NDArray[Any]], suffix: str) -> Pair | None:
    x, y = arrays.get(f"x{suffix}"), arrays.get(f"y{suffix}")
    if (x is None) != (y is None):
        raise FedalignError(f"{path} has only one of x{suffix} and y{suffix}; it needs both")
    return None if x is None or y is None else (x, y)
