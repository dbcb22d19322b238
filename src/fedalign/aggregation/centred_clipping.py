"""Centred clipping (Karimireddy et al., 2021, arXiv:2012.10333)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedalign.aggregation.aggregator import Aggregator
from fedalign.aggregation.clip import check_length, shrink_factors
from fedalign.aggregation.rows import lengths_of
from fedalign.errors import FedalignError


@dataclass(frozen=True)
class CentredClipping(Aggregator):
    """A mean of updates, each clipped to a ``length`` around a centre, which then moves to that mean.

    The centre begins at the received model and moves ``steps`` times. One client moves it by at most ``length / n`` a
    step. Without a length, it is the median of the updates' distances to the centre, at every step; of an even number,
    the smaller of the two in the middle. Shares don't count for the trainable weights; statistics such as BatchNorm's
    are the weighted mean. It holds all updates of a round.

    >>> CentredClipping(length=3.0, steps=1).combine(torch.tensor([[1.0], [2.0], [1000.0]]), torch.full((3,), 1 / 3))
    tensor([2.])
    """

    on_updates = True
    length: float | None = None
    steps: int = 3

    def __post_init__(self) -> None:
        if self.length is not None:
            check_length(self.length)
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise FedalignError(f"steps must be a whole number, 1 or more, not {self.steps!r}")

    def combine(self, models: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the centre after the last step, given updates."""
        centre = torch.zeros_like(models[0])
        for _ in range(self.steps):
            differences = models - centre
            lengths = lengths_of(differences)
            length = lengths.median() if self.length is None else lengths.new_tensor(self.length)
            differences *= shrink_factors(lengths, length).to(models.dtype)[:, None]
            centre = centre + differences.mean(0)
        return centre
