"""The federation as the server sees it: names, roles and sample counts, no data."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedalign.errors import FedalignError


@dataclass(frozen=True)
class Roster:
    """The server's list of clients, with their weights ``p_k = D_k / Σ_{i∈P} D_i``.

    A sample count of 0 means that it is not known yet; such a client has no weight. ``free_cap`` limits the weight of
    every single free client, and ``free_total`` that of all admitted ones together; all priority clients together
    weigh 1.

    >>> roster = Roster(names=("a", "b", "c"), priority=(True, True, False), samples=(1, 3, 20), free_cap=2.0)
    >>> roster.p.tolist()
    [0.25, 0.75, 2.0]
    """

    names: tuple[str, ...]
    priority: tuple[bool, ...]
    samples: tuple[int, ...]
    free_cap: float = math.inf
    free_total: float = math.inf

    def __post_init__(self) -> None:
        for name, cap in (("free_cap", self.free_cap), ("free_total", self.free_total)):
            if isinstance(cap, bool) or not isinstance(cap, numbers.Real) or not cap > 0:
                raise FedalignError(f"{name} must be a positive number, or inf for no cap, not {cap!r}")
        if not len(self.names) == len(self.priority) == len(self.samples):
            raise FedalignError(
                f"{len(self.names)} names, {len(self.priority)} priority flags and {len(self.samples)} sample counts "
                "were given; there must be one of each per client"
            )
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise FedalignError(f"two clients are called {twice!r}; names must differ")
        if not any(self.priority):
            raise FedalignError("no client is a priority client; the objective is theirs, so at least one is needed")

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def p(self) -> npt.NDArray[np.float64]:
        """The clients' weights, which sum to 1 over the priority clients."""
        samples = np.asarray(self.samples, np.float64)
        priority = np.asarray(self.priority, bool)
        total = samples[priority].sum()
        weights: npt.NDArray[np.float64] = samples / total if total else np.zeros_like(samples)
        return weights if self.free_cap == math.inf else np.where(priority, weights, np.minimum(weights, self.free_cap))
