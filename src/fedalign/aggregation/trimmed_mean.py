"""The coordinate-wise trimmed mean (Yin et al., 2018, arXiv:1803.01498)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedalign.aggregation.aggregator import Aggregator
from fedalign.aggregation.hostile import check_hostile, hostile_clients


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
        check_hostile("trim", self.trim)

    def combine(self, models: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the mean of what is left of every coordinate."""
        cut = hostile_clients(self.trim, len(models))
        return models.sort(0).values[cut : len(models) - cut].mean(0)
