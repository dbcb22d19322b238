"""Nearest-neighbour mixing (Allouah et al., 2023, arXiv:2302.01772), before another aggregator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedalign.aggregation.aggregator import AggregateContext, Aggregator, ContextAggregator
from fedalign.aggregation.hostile import check_hostile, hostile_clients
from fedalign.aggregation.next_aggregator import next_aggregator
from fedalign.aggregation.rows import squared_distances, weighted_rows
from fedalign.aggregation.trimmed_mean import TrimmedMean


@dataclass(frozen=True)
class NearestNeighbourMixing(ContextAggregator):
    """Replaces every client's weights by the mean of the ``n − f`` nearest, itself included, and aggregates those.

    ``f`` of the ``n`` clients may be hostile: a fraction (below 0.5), or a number of clients (1 or more), of which at
    most the largest minority counts. ``then`` is the aggregator that follows, as a text, a table or an object; without
    one it is the trimmed mean, with the same ``f``. Shares don't count. Statistics such as BatchNorm's are not mixed.
    It holds all updates of a round, twice.

    >>> models = torch.tensor([[1.0], [2.0], [1000.0], [3.0]])
    >>> NearestNeighbourMixing(f=1, then="median").combine(models, torch.full((4,), 0.25))
    tensor([2.])
    """

    f: float = 0.2
    then: Aggregator | str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_hostile("f", self.f)
        object.__setattr__(self, "then", next_aggregator(self.then))

    def combine_in(self, models: torch.Tensor, shares: torch.Tensor, context: AggregateContext) -> torch.Tensor:
        """Mix the trainable part of every model with its neighbours, and combine what comes out."""
        clients, trainable = len(models), models[:, : context.size]
        near = clients - hostile_clients(self.f, clients)
        nearest = squared_distances(trainable).argsort(dim=1, stable=True)[:, :near]
        weights = models.new_zeros(clients, clients).scatter_(1, nearest, 1 / near)
        mixed = torch.cat([weighted_rows(weights, trainable), models[:, context.size :]], dim=1)
        then = next_aggregator(self.then) or TrimmedMean(self.f)
        return then.combine_in(mixed, torch.full_like(shares, 1 / clients), context)
