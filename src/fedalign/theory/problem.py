"""A federation as an optimisation problem: the objectives of all clients, and the minimisers in the theorems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedalign.errors import FedalignError
from fedalign.theory.minimise import Array, minimise
from fedalign.theory.objectives import Objective


@dataclass(frozen=True, eq=False)
class Problem:
    """The objectives of all clients. F is the mean over the priority clients, with weights ``p`` that sum to 1."""

    objectives: Sequence[Objective]
    priority: npt.NDArray[np.bool_]
    p: Array

    def __post_init__(self) -> None:
        if not self.priority.any():
            raise FedalignError("there is no priority client, so there is nothing to minimise")

    @property
    def size(self) -> int:
        """The number of weights of the linear model."""
        return self.objectives[0].size

    def value(self, w: Array) -> float:
        """Return F(w), the objective of the priority clients."""
        return float(sum(p * o.value(w) for o, p in self._of_priority()))

    @cached_property
    def minimiser(self) -> Array:
        """The weights w* that minimise F."""
        pairs = self._of_priority()
        return minimise([o for o, _ in pairs], np.array([p for _, p in pairs]))

    @cached_property
    def minima(self) -> Array:
        """The minimum F_k* of each client's own objective."""
        return np.array([o.value(o.minimiser) for o in self.objectives])

    def _of_priority(self) -> list[tuple[Objective, float]]:
        return [
            (o, float(p))
            for o, is_priority, p in zip(self.objectives, self.priority, self.p, strict=True)
            if is_priority
        ]
