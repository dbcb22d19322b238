"""Bucketing (Karimireddy et al., 2022, arXiv:2006.09365), before another aggregator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedalign.aggregation.aggregator import AggregateContext, Aggregator, ContextAggregator
from fedalign.aggregation.hostile import check_hostile, hostile_clients
from fedalign.aggregation.next_aggregator import next_aggregator
from fedalign.aggregation.trimmed_mean import TrimmedMean
from fedalign.errors import FedalignError
from fedalign.training.randomness import Purpose, hashed


@dataclass(frozen=True)
class Bucketing(ContextAggregator):
    """Puts clients into random buckets of ``size``, and aggregates the buckets' means.

    The draw is a hash of seed, round and client. The last bucket may be smaller. ``then`` is the aggregator of the
    means, as a text, a table or an object. Without one it is the trimmed mean, which cuts off as many buckets at each
    end as there may be hostile clients, ``f``: a fraction of the clients (below 0.5), or a number of clients (1 or
    more). Where that would leave no bucket, the median of the buckets is taken. Shares don't count. It holds all
    updates of a round.

    >>> Bucketing(size=3, then="median").combine(torch.tensor([[1.0], [2.0], [6.0]]), torch.full((3,), 1 / 3))
    tensor([3.])
    """

    size: int = 2
    f: float = 0.2
    then: Aggregator | str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise FedalignError(f"the size of a bucket must be a whole number, 1 or more, not {self.size!r}")
        check_hostile("f", self.f)
        object.__setattr__(self, "then", next_aggregator(self.then))

    def combine_in(self, models: torch.Tensor, shares: torch.Tensor, context: AggregateContext) -> torch.Tensor:
        """Combine the means of the buckets."""
        means = torch.stack([models[rows].mean(0) for rows in self.buckets(context)])
        then = next_aggregator(self.then) or TrimmedMean(hostile_clients(self.f, len(models)))
        equal = models.new_full((len(means),), 1 / len(means))
        return then.combine_in(means, equal, replace(context, clients=tuple(range(len(means)))))

    def buckets(self, context: AggregateContext) -> list[list[int]]:
        """Draw the rows of every bucket.

        >>> context = AggregateContext(1, torch.zeros(1), clients=(0, 1, 4, 7, 8), seed=3, round=2)
        >>> [len(rows) for rows in Bucketing(size=2).buckets(context)]
        [2, 2, 1]
        """
        drawn = hashed(context.seed, Purpose.BUCKETS, context.round, np.array(context.clients))
        order = np.argsort(drawn, kind="stable").tolist()
        return [order[first : first + self.size] for first in range(0, len(order), self.size)]
