"""Rows of the pool: reading the rows that a caller gives for a client, and holding some of them out."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from fedalign.errors import FedalignError, FederationWarning
from fedalign.training.randomness import Purpose, permutation

Rows = npt.NDArray[np.int64]
NO_ROWS: Rows = np.empty(0, np.int64)


def as_rows(part: npt.ArrayLike, size: int, name: str) -> Rows:
    """Return a client's rows as integers; ``part`` holds row numbers, or is a mask over all ``size`` samples.

    >>> as_rows([True, False, True], 3, "a").tolist()
    [0, 2]
    """
    given = np.asarray(part)
    if given.dtype == bool:
        if given.shape != (size,):
            raise FedalignError(f"client {name!r}: a mask must have one entry per sample ({size}), not {given.shape}")
        given = np.flatnonzero(given)
    if given.size and not np.issubdtype(given.dtype, np.integer):
        raise FedalignError(f"client {name!r}: rows must be whole numbers, not {given.dtype}")
    rows = given.astype(np.int64).reshape(-1)
    outside = rows[(rows < 0) | (rows >= size)]
    if len(outside):
        raise FedalignError(f"client {name!r}: row {int(outside[0])} is outside the {size} samples of the data")
    return rows


def hold_out(
    rows: Rows,
    labels: npt.NDArray[Any],
    fraction: float,
    seed: int,
    client: int,
    name: str,
    purpose: Purpose = Purpose.SPLIT,
) -> tuple[Rows, Rows]:
    """Split a client's rows into training and held-out rows, stratified by class; both keep their order.

    Counts per class are rounded by largest remainder, so that they add up to the rounded total. At least one sample is
    held out and at least one is left for training. A client with a single sample uses it for both, with a warning.
    ``purpose`` makes two splits of the same rows independent.
    """
    if fraction == 0:
        return rows, NO_ROWS
    if len(rows) == 1:
        warnings.warn(
            f"client {name!r} has one sample: it is used both for training and as held-out data",
            FederationWarning,
            stacklevel=4,
        )
        return rows, rows
    total = min(max(1, int(fraction * len(rows) + 0.5)), len(rows) - 1)
    if np.issubdtype(labels.dtype, np.floating) or labels.ndim > 1:
        groups = np.zeros(len(rows), np.int64)  # numbers, sequences and sets of labels are no classes
    else:
        groups = np.unique(labels, return_inverse=True)[1].reshape(-1)
    sizes = np.bincount(groups)
    quota = sizes * (total / len(rows))
    counts = np.floor(quota).astype(np.int64)
    by_remainder = np.argsort(counts - quota, kind="stable")
    counts[by_remainder[: total - counts.sum()]] += 1
    order = permutation(len(rows), seed, purpose, client)
    taken = np.zeros(len(rows), bool)
    for group, count in enumerate(counts):
        taken[order[groups[order] == group][:count]] = True
    return rows[~taken], rows[taken]


def set_aside(
    rows: Rows, labels: npt.NDArray[Any], fraction: float, seed: int, client: int, name: str
) -> tuple[Rows, Rows]:
    """Split a client's rows into those to keep and those to test with; a client with fewer than 3 tests with none.

    >>> kept, test = set_aside(np.arange(10), np.zeros(10, int), 0.3, 0, 0, "a")
    >>> len(kept), len(test)
    (7, 3)
    """
    if fraction == 0 or len(rows) < 3:
        return rows, NO_ROWS
    return hold_out(rows, labels[rows], fraction, seed, client, name, Purpose.TEST_SPLIT)
