"""Multi-Krum (Blanchard et al., 2017): the mean of the models that are nearest to their neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedalign.aggregation.client_weights import ClientWeights
from fedalign.aggregation.hostile import check_hostile, hostile_clients
from fedalign.aggregation.krum import neighbour_sums


@dataclass(frozen=True)
class MultiKrum(ClientWeights):
    """The mean of the ``n − f`` models with the smallest sums of squared distances to ``n − f − 1`` others each.

    ``f`` of the ``n`` clients may be hostile: a fraction (below 0.5), or a number of clients (1 or more), of which at
    most the largest minority counts. Shares don't count. Where sums are equal, clients with lower numbers come first.
    It holds all updates of a round.

    >>> MultiKrum(f=1).combine(torch.tensor([[1.0], [2.0], [1000.0], [3.0]]), torch.full((4,), 0.25))
    tensor([2.])
    """

    f: float = 0.2

    def __post_init__(self) -> None:
        check_hostile("f", self.f)

    def weights(self, vectors: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Return equal weights for the chosen clients, and 0 for the others."""
        hostile = hostile_clients(self.f, len(vectors))
        chosen = neighbour_sums(vectors, hostile).argsort(stable=True)[: len(vectors) - hostile]
        weights = vectors.new_zeros(len(vectors), dtype=torch.float64)
        weights[chosen] = 1 / len(chosen)
        return weights
