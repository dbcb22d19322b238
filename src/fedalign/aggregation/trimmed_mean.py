"""The coordinate-wise trimmed mean (Yin et al., 2018, arXiv:1803.01498)."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import torch

from fedalign.aggregation.aggregator import Aggregator
from fedalign.errors import FedalignError


@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """The mean of every coordinate without its largest and smallest values, whatever the clients' shares.

    ``trim`` is cut off at each end: a fraction of the clients (below 0.5), or a number of clients (1 or more). Where
    that would leave no client, the median is taken. It holds all updates of a round.

    >>> TrimmedMean(trim=1).combine(torch.tensor([[1.0], [2.0], [1000.0], [4.0]]), torch.full((4,), 0.25))
    tensor([3.])
    """

    trim: float = 0.1

    def __post_init__(self) -> None:
        real = isinstance(self.trim, numbers.Real) and not isinstance(self.trim, bool)
        if not real or not (0 <= self.trim < 0.5 or (self.trim >= 1 and self.trim == int(self.trim))):
            raise FedalignError(f"trim must be a fraction below 0.5, or a whole number of clients, not {self.trim!r}")

    def combine(self, models: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the mean of what is left of every coordinate."""
        clients = len(models)
        cut = int(self.trim) if self.trim >= 1 else math.floor(self.trim * clients)
        cut = min(cut, (clients - 1) // 2)
        return models.sort(0).values[cut : clients - cut].mean(0)
