"""The geometric median (Pillutla et al., 2022, arXiv:1912.13445), by the smoothed Weiszfeld algorithm."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import torch

from fedalign.aggregation.client_weights import ClientWeights
from fedalign.errors import FedalignError


@dataclass(frozen=True)
class GeometricMedian(ClientWeights):
    """The point with the smallest sum of distances to the clients' models, whatever their shares.

    It begins at the received model, and ``steps`` times takes the mean with weights ``1 / max(smoothing, distance)``.
    It stops early where the point no longer moves. Fewer than half of the clients cannot move it far. It holds all
    updates of a round.

    >>> GeometricMedian().combine(torch.tensor([[1.0], [2.0], [1000.0]]), torch.full((3,), 1 / 3))
    tensor([2.0000])
    """

    steps: int = 20
    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise FedalignError(f"steps must be a whole number, 1 or more, not {self.steps!r}")
        real = isinstance(self.smoothing, numbers.Real) and not isinstance(self.smoothing, bool)
        if not real or not 0 < self.smoothing < math.inf:
            raise FedalignError(f"smoothing must be a positive length, not {self.smoothing!r}")

    def weights(self, vectors: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Return the weights of the last step."""
        point = start.double()
        weights = vectors.new_full((len(vectors),), 1 / len(vectors), dtype=torch.float64)
        for _ in range(self.steps):
            distances = torch.stack([torch.linalg.vector_norm(vector - point) for vector in vectors])
            weights = 1 / distances.clamp(min=self.smoothing)
            weights /= weights.sum()
            before, point = point, torch.zeros_like(point)
            for vector, weight in zip(vectors, weights.tolist(), strict=True):
                point.add_(vector, alpha=weight)
            if torch.linalg.vector_norm(point - before) <= 1e-7 * distances.median():
                break
        return weights
