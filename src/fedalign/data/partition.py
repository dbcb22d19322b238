"""Partitions of a data set: single-class shards, Dirichlet, IID, given sizes; and test sets with a client's class mix.

A partition takes the labels of all samples and returns one array of rows for each client. All draws are hashes of the
seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedalign.errors import FedalignError
from fedalign.training.randomness import Purpose, generator, permutation

Rows = npt.NDArray[np.int64]
Labels = npt.NDArray[np.integer]
# These numbers separate the different draws of one purpose.
_IN_CLASS, _DEAL, _MIX, _TEST, _LIMIT = range(5)


def shards(
    labels: Labels, clients: int, each: int, size: int | None = None, *, replacement: bool = False, seed: int = 0
) -> list[Rows]:
    """Cut every class into shards of ``size`` samples and give each client ``each`` random shards.

    Without ``size``, the shards are as large as the data allows. With ``replacement``, a shard may go to several
    clients, but not twice to the same one.

    >>> parts = shards(np.repeat([0, 1, 2], 8), clients=3, each=2, size=4)
    >>> [len(part) for part in parts], len(np.unique(np.concatenate(parts)))
    ([8, 8, 8], 24)
    """
    by_class = _by_class(labels, seed)
    needed = each if replacement else clients * each
    largest = largest_shard([len(rows) for rows in by_class], needed)
    size = largest if size is None else size
    if size < 1 or size > largest:
        raise FedalignError(
            f"{clients} clients × {each} shards of {size} samples need {needed} single-class shards; the data has "
            f"{sum(len(rows) // max(size, 1) for rows in by_class)}: at most {largest} samples per shard are possible"
        )
    cut = [rows[i * size : (i + 1) * size] for rows in by_class for i in range(len(rows) // size)]
    if replacement:
        dealt = [permutation(len(cut), seed, Purpose.DATA, _DEAL, k)[:each] for k in range(clients)]
    else:
        dealt = list(permutation(len(cut), seed, Purpose.DATA, _DEAL)[: clients * each].reshape(clients, each))
    return [np.concatenate([cut[shard] for shard in chosen]) for chosen in dealt]


def largest_shard(class_sizes: Sequence[int], needed: int) -> int:
    """Return the largest shard size at which classes of these sizes give ``needed`` single-class shards.

    >>> largest_shard([6000] * 10, 120)
    500
    """
    low, high = 0, max(class_sizes, default=0)
    while low < high:
        size = (low + high + 1) // 2
        low, high = (size, high) if sum(n // size for n in class_sizes) >= needed else (low, size - 1)
    return low


def dirichlet(labels: Labels, clients: int, alpha: float, seed: int = 0) -> list[Rows]:
    """Split every class among the clients in proportions drawn from Dirichlet(α); a small α gives few classes each.

    Hsu, Qi and Brown (2019, arXiv:1909.06335). The draw is repeated, up to a hundred times, until every client has at
    least two samples.

    >>> parts = dirichlet(np.arange(100) % 5, clients=4, alpha=0.5)
    >>> sorted(np.concatenate(parts).tolist()) == list(range(100))
    True
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise FedalignError(f"data.alpha must be positive, not {alpha}")
    by_class = _by_class(labels, seed)
    for attempt in range(100):
        draw = generator(seed, Purpose.DATA, _MIX, attempt)
        parts: list[list[Rows]] = [[] for _ in range(clients)]
        for rows in by_class:
            shares = draw.dirichlet(np.full(clients, alpha))
            bounds = np.floor(np.cumsum(shares)[:-1] * len(rows) + 0.5).astype(np.int64)
            for k, part in enumerate(np.split(rows, bounds)):
                parts[k].append(part)
        joined = [np.concatenate(pieces) for pieces in parts]
        if min(len(part) for part in joined) >= 2:
            return joined
    raise FedalignError(
        f"Dirichlet({alpha}) gives some of {clients} clients fewer than two samples in each of a hundred draws; "
        "use a larger alpha or fewer clients"
    )


def iid(labels: Labels, clients: int, seed: int = 0) -> list[Rows]:
    """Split all samples evenly and at random; the clients' sizes differ by at most one.

    >>> [len(part) for part in iid(np.zeros(11, int), clients=3)]
    [4, 4, 3]
    """
    if clients > len(labels):
        raise FedalignError(f"{len(labels)} samples are not enough for {clients} clients")
    return [part.copy() for part in np.array_split(permutation(len(labels), seed, Purpose.DATA, _DEAL), clients)]


def by_sizes(labels: Labels, sizes: Sequence[int], seed: int = 0) -> list[Rows]:
    """Give each client random samples, as many as ``sizes`` says.

    >>> [len(part) for part in by_sizes(np.zeros(10, int), [5, 1, 2])]
    [5, 1, 2]
    """
    if min(sizes, default=0) < 1 or sum(sizes) > len(labels):
        raise FedalignError(
            f"data.sizes must be at least 1 each and {len(labels)} together at most, not {sum(sizes)} in {len(sizes)}"
        )
    order = permutation(len(labels), seed, Purpose.DATA, _DEAL)
    bounds = np.cumsum(sizes)
    return [order[end - size : end] for size, end in zip(sizes, bounds.tolist(), strict=True)]


def limited(part: Rows, labels: Labels, samples: int, seed: int, client: int) -> Rows:
    """Keep at most ``samples`` random rows of a client, with the class mix of all its rows."""
    if samples >= len(part):
        return part
    counts = mix_counts(np.bincount(labels[part]), samples)
    order = part[permutation(len(part), seed, Purpose.DATA, _LIMIT, client)]
    return np.concatenate([order[labels[order] == c][:n] for c, n in enumerate(counts) if n])


def with_same_mix(part: Rows, labels: Labels, test_labels: Labels, samples: int | None, seed: int, client: int) -> Rows:
    """Draw a test set with the class mix of a client's samples from the test split.

    It has ``samples`` samples, or fewer if the test split has not enough of some class. A class that the test split
    lacks raises :class:`FedalignError`.
    """
    mix = np.bincount(labels[part], minlength=int(test_labels.max()) + 1)
    there = np.bincount(test_labels, minlength=len(mix))
    has = mix > 0
    if (there[has] == 0).any():
        lacking = int(np.flatnonzero(has & (there == 0))[0])
        raise FedalignError(f"the test split has no sample of class {lacking}, which client {client} holds")
    most = int(np.floor((there[has] / (mix[has] / mix.sum())).min() + 1e-9))
    counts = mix_counts(mix, most if samples is None else min(samples, most))
    rows = [
        np.flatnonzero(test_labels == c)[permutation(int(there[c]), seed, Purpose.DATA, _TEST, client, c)[:n]]
        for c, n in enumerate(counts.tolist())
        if n
    ]
    return np.sort(np.concatenate(rows))


def mix_counts(mix: npt.NDArray[np.integer], total: int) -> npt.NDArray[np.int64]:
    """Split ``total`` in the proportions of ``mix``, each within one of its exact share (largest remainders).

    >>> mix_counts(np.array([300, 100, 100]), 7).tolist()
    [4, 2, 1]
    """
    exact = mix * (total / mix.sum())
    counts: npt.NDArray[np.int64] = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]] += 1
    return counts


def _by_class(labels: Labels, seed: int) -> list[Rows]:
    """Return the rows of each class in random order."""
    found = [np.flatnonzero(labels == c) for c in range(int(labels.max()) + 1)]
    return [rows[permutation(len(rows), seed, Purpose.DATA, _IN_CLASS, c)] for c, rows in enumerate(found)]
