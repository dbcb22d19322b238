"""How much clients' updates are alike beyond what all clients have in common."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch

from fedalign.aggregation.aggregator import scaled
from fedalign.aggregation.anchor import Anchor
from fedalign.aggregation.rows import products_of
from fedalign.protocol.messages import Mix


def resemblances(
    mix: Mix, models: Mapping[int, torch.Tensor], received: torch.Tensor, size: int
) -> dict[tuple[int, int], float]:
    """Return the cosine of every two clients' updates, less the mean update of all clients of the mix.

    Updates outside the anchor are bounded first, as the mix says: what an aggregate does not contain cannot hide a
    resemblance. ``size`` is the number of trainable numbers. An update that equals the mean has the cosine 0 with all
    others. One that is too large for its numbers, which no honest client sends, has the cosine 1.

    >>> models = {0: torch.tensor([0.0, 0.0]), 1: torch.tensor([3.0, 3.0]), 2: torch.tensor([3.0, 0.0])}
    >>> found = resemblances(Mix({0: 0.4, 1: 0.3, 2: 0.3}, anchor=(0,)), models, torch.zeros(2), size=2)
    >>> {pair: round(cosine, 2) for pair, cosine in found.items()}  # the mean is (2, 1)
    {(0, 1): -0.8, (0, 2): -0.32, (1, 2): -0.32}
    """
    anchor = Anchor(dict(Anchor.weights_of(mix)), size)
    for k in mix.anchor:
        anchor.add(k, models[k], received)
    clients = sorted(mix.shares)
    bounded = (
        anchor.bound(k, scaled(models[k], received, mix.step.get(k, 1.0), size), received, mix.within) for k in clients
    )
    updates = torch.stack([one[:size] for one in bounded])
    products = products_of(updates - updates[torch.isfinite(updates).all(dim=1)].mean(0))
    lengths = products.diagonal().sqrt()
    cosines = (products / (lengths[:, None] * lengths).clamp(min=1e-300)).nan_to_num(1.0, 1.0, 1.0).tolist()
    return {(clients[i], clients[j]): cosines[i][j] for i, j in combinations(range(len(clients)), 2)}
