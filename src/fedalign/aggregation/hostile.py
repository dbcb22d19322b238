"""How many hostile clients an aggregator allows for: a number of clients, or a fraction of those that take part."""

from __future__ import annotations

import math
import numbers

from fedalign.errors import FedalignError


def check_hostile(name: str, f: float) -> None:
    """Raise :class:`FedalignError`, which names the option, unless it is a fraction below 0.5 or a whole number.

    >>> check_hostile("f", 0.7)
    Traceback (most recent call last):
    fedalign.errors.FedalignError: f must be a fraction below 0.5, or a whole number of clients, not 0.7
    """
    real = isinstance(f, numbers.Real) and not isinstance(f, bool)
    if not real or not (0 <= f < 0.5 or (1 <= f < math.inf and f == int(f))):
        raise FedalignError(f"{name} must be a fraction below 0.5, or a whole number of clients, not {f!r}")


def hostile_clients(f: float, clients: int) -> int:
    """Return how many of the clients may be hostile: ``f`` of them, but always fewer than half.

    >>> [hostile_clients(0.2, clients) for clients in (4, 5, 10)]
    [0, 1, 2]
    >>> [hostile_clients(3, clients) for clients in (1, 2, 3, 4, 7, 20)]
    [0, 0, 1, 1, 3, 3]
    """
    # 0.29 · 100 is a little less than 29 in binary.
    count = int(f) if f >= 1 else math.floor(f * clients + 1e-9)
    return min(count, (clients - 1) // 2)
