"""Who is in the federation, seen from the server: names, roles and sample counts, no data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedalign.errors import FedalignError


@dataclass(frozen=True)
class Roster:
    """The server's list of clients; ``p`` are SPEC's weights ``p_k = D_k / Σ_{i∈P} D_i``, for every client.

    >>> Roster(names=("a", "b", "c"), priority=(True, True, False), samples=(1, 3, 2)).p.tolist()
    [0.25, 0.75, 0.5]
    """

    names: tuple[str, ...]
    priority: tuple[bool, ...]
    samples: tuple[int, ...]

    def __post_init__(self) -> None:
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
        for name, samples in zip(self.names, self.samples, strict=True):
            if samples < 1:
                raise FedalignError(f"client {name!r} has no training samples; leave it out or give it some")

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def p(self) -> npt.NDArray[np.float64]:
        """The clients' weights, which sum to 1 over the priority clients."""
        samples = np.asarray(self.samples, np.float64)
        weights: npt.NDArray[np.float64] = samples / samples[np.asarray(self.priority, bool)].sum()
        return weights
