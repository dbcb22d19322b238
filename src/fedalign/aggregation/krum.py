"""Krum (Blanchard et al., 2017): the one model that is nearest to its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedalign.aggregation.client_weights import ClientWeights
from fedalign.aggregation.hostile import check_hostile, hostile_clients
from fedalign.aggregation.rows import squared_distances


@dataclass(frozen=True)
class Krum(ClientWeights):
    """The client's model with the smallest sum of squared distances to its ``n − f − 1`` nearest others.

    ``f`` of the ``n`` clients may be hostile: a fraction (below 0.5), or a number of clients (1 or more), of which at
    most the largest minority counts. Shares don't count. Where sums are equal, the client with the lowest number is
    chosen. Of one or two clients, none is nearer than the other, and the mean is taken. It holds all updates of a
    round.

    >>> Krum(f=1).combine(torch.tensor([[1.0], [2.0], [1000.0], [2.5]]), torch.full((4,), 0.25))
    tensor([2.])
    """

    f: float = 0.2

    def __post_init__(self) -> None:
        check_hostile("f", self.f)

    def weights(self, vectors: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Return 1 for the chosen client, and 0 for the others."""
        clients = len(vectors)
        if clients < 3:
            return vectors.new_full((clients,), 1 / clients)
        weights = vectors.new_zeros(clients)
        weights[neighbour_sums(vectors, hostile_clients(self.f, clients)).argmin()] = 1
        return weights


def neighbour_sums(vectors: torch.Tensor, hostile: int) -> torch.Tensor:
    """Return, for each of n rows, the sum of squared distances to its ``n − hostile − 1`` nearest others.

    >>> neighbour_sums(torch.tensor([[0.0], [1.0], [3.0]]), hostile=1)
    tensor([1., 1., 4.], dtype=torch.float64)
    """
    nearest = squared_distances(vectors).sort(dim=1).values  # the first is a row's distance to itself
    return nearest[:, 1 : len(vectors) - hostile].sum(1)
