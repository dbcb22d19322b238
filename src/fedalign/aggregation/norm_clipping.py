"""Norm clipping (Sun et al., 2019, arXiv:1911.07963): the weighted mean of updates of bounded length."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedalign.aggregation.aggregator import Accumulator, Aggregator, WeightedMean
from fedalign.aggregation.clip import check_length, shortened, shrink_factors
from fedalign.aggregation.rows import lengths_of


@dataclass(frozen=True)
class NormClipping(Aggregator):
    """The weighted mean of updates, each shortened to at most ``length``.

    With a length, it sums updates as they arrive and holds none. Without one, the length is the median length of the
    round's updates (of an even number, the smaller of the two in the middle), and it holds all of them. Statistics such
    as BatchNorm's are the weighted mean.

    >>> NormClipping(length=1.0).combine(torch.tensor([[0.5, 0.0], [30.0, 40.0]]), torch.tensor([0.5, 0.5]))
    tensor([0.5500, 0.4000])
    """

    on_updates = True
    length: float | None = None

    def __post_init__(self) -> None:
        if self.length is not None:
            check_length(self.length)
        object.__setattr__(self, "streams", self.length is not None)

    def combine(self, models: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the weighted mean of the shortened updates."""
        lengths = lengths_of(models)
        length = lengths.median() if self.length is None else lengths.new_tensor(self.length)
        factors = shrink_factors(lengths, length).to(models.dtype)
        return WeightedMean().combine(models * factors[:, None], shares)

    def start(self) -> Accumulator:
        """Begin a sum of shortened updates; without a length, hold the updates."""
        return super().start() if self.length is None else _ClippedSum(self.length)


class _ClippedSum:
    """Shortens updates and sums them as they arrive."""

    def __init__(self, length: float) -> None:
        self._length, self._total = length, WeightedMean().start()

    def add(self, model: torch.Tensor, share: float) -> None:
        self._total.add(shortened(model, self._length), share)

    def result(self) -> torch.Tensor:
        return self._total.result()
