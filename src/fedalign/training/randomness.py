"""Randomness without hidden state: every draw is a hash of (seed, purpose, round, client, epoch, …).

A generator object remembers how often it was asked, so a result would depend on who else trained, on chunk sizes
and on where a run was interrupted. A hash doesn't. The mixing function is SplitMix64's finaliser
(Steele, Lea and Flood, 2014), applied word by word.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

U64 = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1
_INDEX_BITS = np.uint64(24)  # a permuted row may hold up to 16.7 million samples
_INDEX_MASK = np.uint64((1 << 24) - 1)


class Purpose(enum.IntEnum):
    """What a draw is for, so that equal counters never give equal numbers for two purposes."""

    BATCHES = 1
    INITIAL_WEIGHTS = 2
    PARTICIPATION = 3
    SPLIT = 4
    DATA = 5
    EVALUATORS = 6
    DROPOUT = 7  # and every other random number that a model draws while it trains
    ADVERSARY = 8
    BUCKETS = 9
    TEST_SPLIT = 10
    CANDIDATES = 11  # whose models a client of FedFomo measures
    LEDGER = 12


def _splitmix(z: U64) -> U64:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def hashed(*words: int | npt.NDArray[np.integer]) -> U64:
    """Hash integers (broadcast against each other) to 64 bits.

    >>> int(hashed(0, Purpose.BATCHES, 3)) == int(hashed(0, Purpose.BATCHES, np.arange(5))[3])
    True
    """
    h = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            w = np.asarray(word).astype(np.int64).astype(np.uint64)
            h = _splitmix((h + _GOLDEN) ^ (w * _GOLDEN + np.uint64(1)))
    return h


def uniforms(*words: int | npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Hash integers to numbers in [0, 1)."""
    return np.asarray((hashed(*words) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def permutations(keys: U64, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Permute ``range(lengths[r])`` for every row ``r``; what lies behind a row's length is undefined.

    A row depends on its own key and length alone. Hash and index share one word, so that one plain sort (which
    NumPy vectorises) gives the permutation.

    >>> sorted(permutations(hashed(7, np.arange(2)), np.array([4, 2]))[0].tolist())
    [0, 1, 2, 3]
    """
    width = int(lengths.max(initial=0))
    if width > int(_INDEX_MASK):
        raise ValueError(f"cannot permute {width} samples of one client; the limit is {int(_INDEX_MASK)}")
    index = np.arange(width, dtype=np.uint64)
    with np.errstate(over="ignore"):
        words = _splitmix(keys[:, None] + index * _GOLDEN)
    words = (words & ~_INDEX_MASK) | index
    words[index >= lengths.astype(np.uint64)[:, None]] = np.uint64(0xFFFFFFFFFFFFFFFF)
    words.sort(axis=1)
    found: npt.NDArray[np.int64] = (words & _INDEX_MASK).astype(np.int64)
    return found


def permutations_on(device: torch.device, keys: U64, lengths: npt.NDArray[np.int64]) -> torch.Tensor:
    """Give what :func:`permutations` gives, computed on a device with PyTorch's signed integers."""
    import torch

    width = int(lengths.max(initial=0))
    index = torch.arange(width, device=device)
    key = torch.from_numpy(keys.view(np.int64)).to(device)
    z = key[:, None] + index * _signed(int(_GOLDEN))
    z = _finalised(z)
    mask = int(_INDEX_MASK)
    # Flipping the sign makes the order of signed numbers that of unsigned ones.
    words = ((z & ~mask) | index) ^ _signed(1 << 63)
    words[index >= torch.from_numpy(lengths).to(device)[:, None]] = (1 << 63) - 1
    return words.sort(dim=1).values & mask


def hashed_positions(key: torch.Tensor, draw: int, shape: Sequence[int]) -> torch.Tensor:
    """Hash every position of a tensor of some shape to 64 bits (as signed integers), the same on every device.

    ``key`` has one number, or one for each client of a stack, which then is the result's first dimension; ``draw``
    tells apart several tensors of one key. A position is hashed by its coordinates, so that its number doesn't depend
    on the shape: the first rows of a padded batch get what they get without padding.

    >>> import torch
    >>> small, large = (hashed_positions(torch.tensor(7), 0, (2, width)) for width in (3, 5))
    >>> torch.equal(small, large[:, :3])
    True
    """
    import torch

    start = _finalised(key + _signed((draw + 1) * int(_GOLDEN) & _WORD))
    z = start.reshape((*start.shape, *(1,) * len(shape)))
    for dimension, length in enumerate(shape):
        index = torch.arange(1, length + 1, device=key.device) * _multiplier(dimension)
        z = z + index.view((-1, *(1,) * (len(shape) - dimension - 1)))
    return _finalised(z)


def _finalised(z: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's finaliser to PyTorch's signed integers."""
    z = (z ^ _shift(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    z = (z ^ _shift(z, 27)).mul_(_signed(0x94D049BB133111EB))
    return z.bitwise_xor_(_shift(z, 31))


@functools.cache
def _multiplier(dimension: int) -> int:
    """Give an odd number for one dimension of a tensor: sums of coordinates times such numbers hardly ever collide."""
    return _signed(int(hashed(Purpose.DROPOUT, dimension)) | 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _shift(z: torch.Tensor, by: int) -> torch.Tensor:
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def permutation(length: int, *words: int) -> npt.NDArray[np.int64]:
    """Permute ``range(length)`` by the hash of ``words``."""
    row: npt.NDArray[np.int64] = permutations(hashed(*words).reshape(1), np.array([length]))[0]
    return row


def generator(*words: int) -> np.random.Generator:
    """Make a NumPy generator for one purpose, where many normal draws are needed at once (synthetic data)."""
    return np.random.Generator(np.random.Philox(key=int(hashed(*words))))
