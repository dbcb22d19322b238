"""Clients in any form: arrays, tables, files and data sets of other libraries, read as features and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedalign.data import datasets, tables
from fedalign.data.columns import Columns, feature_names, targets
from fedalign.errors import FedalignError

Pair = tuple[Any, Any]
_SPLITS = ("train", "heldout", "test")
_OTHER_NAMES = {"validation": "heldout"}  # as Hugging Face's data sets have it


@dataclass(frozen=True)
class Reading:
    """How clients' data are read: which columns hold targets and features, and which one names a row's split."""

    target: str | Sequence[str] | None = None
    features: Sequence[str] | None = None
    split: str | None = None
    first: Columns | None = None  #: the columns of the first table, where no features are named

    def read(self, given: Any, what: str) -> tuple[Reading, Pair]:
        """Read one client's data as features and labels; ``what`` names the client in error messages.

        Returns also how to read the next client: the feature columns are those of the first. Raises
        :class:`FedalignError` if the data are in none of the forms, cannot be read, or have other columns.

        >>> Reading().read(([[1.0], [2.0]], [0, 1]), "client 'a'")[1]
        ([[1.0], [2.0]], [0, 1])
        """
        if isinstance(given, str | Path):
            given = tables.read_table(_table_path(Path(given)))
        following = self
        if tables.is_frame(given) or datasets.is_hugging_face(given):
            names = given.columns if tables.is_frame(given) else given.column_names
            following = self._with_columns(Columns([str(name) for name in names], what))
        return following, following._samples(given, what)

    def _with_columns(self, columns: Columns) -> Reading:
        if self.features is None:
            return replace(self, features=feature_names(columns, targets(columns, self.target), None), first=columns)
        different = set(columns.names) ^ set(self.first.names) if self.first is not None else set()
        if self.first is not None and different:
            raise FedalignError(
                f"{columns.what} and {self.first.what} differ in column {min(different)!r}: all need the same columns, "
                "or features must name those to train on"
            )
        return self

    def _samples(self, given: Any, what: str) -> Pair:
        if tables.is_frame(given):
            return tables.samples_of(given, self.target, self.features, what)
        if datasets.is_hugging_face(given):
            return datasets.from_hugging_face(given, self.target, self.features, what)
        if isinstance(given, tuple | list) and len(given) == 2:
            return given[0], given[1]
        if datasets.is_torch_dataset(given):
            return datasets.from_torch(given, what)
        raise FedalignError(
            f"{what}: {type(given).__name__} is no form of data; give (x, y), a pandas frame, a .csv or .parquet file, "
            "a torch.utils.data.Dataset or a datasets.Dataset"
        )


@dataclass
class Parts:
    """The clients' names and samples; ``classes`` are the names of class numbers, where the data have such."""

    train: dict[str, Pair] = field(default_factory=dict)
    heldout: dict[str, Pair] = field(default_factory=dict)
    test: dict[str, Pair] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None

    def arguments(self) -> dict[str, Any]:
        """Return what :meth:`Federation.from_arrays` takes of them.

        Raises :class:`FedalignError` if some clients have held-out samples and others have none.
        """
        names = list(self.train)
        lacking = [name for name in names if name not in self.heldout] if self.heldout else []
        if lacking:
            raise FedalignError(
                f"some clients have held-out data, but {lacking[0]!r} has none; give it to all or to none"
            )
        return {
            "train": list(self.train.values()),
            "heldout": [self.heldout[name] for name in names] if self.heldout else None,
            "test": [self.test.get(name) for name in names] if self.test else None,
            "names": names,
            "classes": self.classes,
        }


def read_clients(
    clients: Any, reading: Reading, heldout: Any = None, test: Any = None, client: str | None = None
) -> Parts:
    """Read all clients, with further samples to hold out and to test with.

    ``clients`` is a mapping from names to data, a list of data, a table with a column ``client``, or what
    ``flwr_datasets`` divides. Raises :class:`FedalignError`, which names the client that cannot be read.

    >>> parts = read_clients({"a": ([[1.0], [2.0]], [0, 1])}, Reading())
    >>> list(parts.train), parts.test
    (['a'], {})
    """
    parts = Parts()
    named = by_name(clients, client)
    for name, given in named.items():
        what = f"client {name!r}"
        for split, part in _splits(given, reading.split, what).items():
            parts.classes = parts.classes or datasets.class_names(part, reading.target)
            reading, samples = reading.read(part, what)
            getattr(parts, split)[name] = samples
    for split, more in (("heldout", heldout), ("test", test)):
        for name, given in by_name(more, client, like=list(named)).items() if more is not None else ():
            if name not in named:
                raise FedalignError(f"there is {split} data of {name!r}, which is no client")
            if given is not None:
                _, getattr(parts, split)[name] = reading.read(given, f"client {name!r}, {split} data")
    _join_number_types(parts)
    return parts


def by_name(clients: Any, client: str | None = None, like: Sequence[str] | None = None) -> dict[str, Any]:
    """Return clients' data by name; a list's clients are called as those of ``like``, or ``"0"``, ``"1"`` and so on."""
    if isinstance(clients, str | Path):
        clients = tables.read_table(_table_path(Path(clients)))
    if client is not None:
        if not tables.is_frame(clients):
            raise FedalignError(f"client={client!r} names a column, so the data must be one table with all clients")
        column = Columns([str(name) for name in clients.columns], "the table").check(client)
        return {str(name): part.drop(columns=column) for name, part in clients.groupby(column, sort=True)}
    if (divided := datasets.partitions(clients)) is not None:
        return divided
    if isinstance(clients, Mapping):
        return {str(name): given for name, given in clients.items()}
    if tables.is_frame(clients):
        raise FedalignError("one table with all clients needs client=, the name of the column that tells them apart")
    if not isinstance(clients, Sequence):
        raise FedalignError(
            f"clients must be a mapping from names to data, or a list of data, not a {type(clients).__name__}"
        )
    given = list(clients)
    names = like if like is not None else [str(k) for k in range(len(given))]
    if len(names) != len(given):
        raise FedalignError(f"there are data of {len(given)} clients, but {len(names)} clients")
    return dict(zip(names, given, strict=True))


def _splits(given: Any, column: str | None, what: str) -> dict[str, Any]:
    """Divide a client's data: a mapping of splits, or a table by a column that says train, heldout or test."""
    if isinstance(given, Mapping):
        return _checked_splits({_OTHER_NAMES.get(str(key), str(key)): part for key, part in given.items()}, what)
    if column is None:
        return {"train": given}
    if isinstance(given, str | Path):
        given = tables.read_table(_table_path(Path(given)))
    if not tables.is_frame(given):
        raise FedalignError(f"{what}: split={column!r} names a column, so the data must be a table")
    Columns([str(name) for name in given.columns], what).check(column)
    found = {str(value): part.drop(columns=column) for value, part in given.groupby(column, sort=True)}
    return _checked_splits(found, f"{what}, column {column!r}")


def _checked_splits(found: dict[str, Any], what: str) -> dict[str, Any]:
    for split in found:
        if split not in _SPLITS:
            raise FedalignError(f"{what}: there is a split {split!r}; known: {', '.join(_SPLITS)}")
    if "train" not in found:
        raise FedalignError(f"{what}: there are no training samples; name the split 'train'")
    return found


def _join_number_types(parts: Parts) -> None:
    """Make features floating-point numbers for all clients where some have such: 1 and 1.0 are the same in a table."""
    everything = (parts.train, parts.heldout, parts.test)
    kinds = {np.asarray(x).dtype.kind for split in everything for x, _ in split.values() if isinstance(x, np.ndarray)}
    if "f" in kinds and len(kinds) > 1 and kinds <= set("fiu"):
        for split in everything:
            for name, (x, y) in split.items():
                is_whole = isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.dtype != np.uint8
                split[name] = (x.astype(np.float64) if is_whole else x, y)


def _table_path(path: Path) -> Path:
    if path.suffix not in tables.SUFFIXES:
        raise FedalignError(f"{path} is not a .csv or .parquet file")
    return path
