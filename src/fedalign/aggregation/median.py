"""The coordinate-wise median (Yin et al., 2018, arXiv:1803.01498)."""

from __future__ import annotations

import torch

from fedalign.aggregation.aggregator import Aggregator


class CoordinateMedian(Aggregator):
    """The median of every coordinate over the clients, whatever their shares.

    Fewer than half of the clients cannot move a coordinate beyond the others' values. It holds all updates of a round.

    >>> CoordinateMedian().combine(torch.tensor([[1.0], [2.0], [1000.0], [4.0]]), torch.full((4,), 0.25))
    tensor([3.])
    """

    def combine(self, models: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the middle value of every coordinate; of an even number, the mean of the two in the middle."""
        ordered = models.sort(0).values
        low, high = (len(models) - 1) // 2, len(models) // 2
        return ordered[low] if low == high else (ordered[low] + ordered[high]) / 2
