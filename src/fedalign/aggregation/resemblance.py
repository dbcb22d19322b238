"""How much clients' updates are alike beyond what they have in common with trusted clients."""

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
    """Return the cosine of every two clients' updates, less the mean update of the mix's anchor.

    Updates are bounded first, as the mix says: what an aggregate does not contain cannot hide a resemblance. ``size``
    is the number of trainable numbers. An update that equals the mean has the cosine 0 with all others, and one whose
    cosines are not finite, which no honest client sends, has the cosine 1.

    >>> models = {0: torch.tensor([1.0, 1.0]), 1: torch.tensor([2.0, 1.0]), 2: torch.tensor([5.0, 1.0])}
    >>> resemblances(Mix({0: 0.4, 1: 0.3, 2: 0.3}, anchor=(0,)), models, torch.zeros(2), size=2)
    {(1, 2): 1.0}
    """
    anchor = Anchor(dict(Anchor.weights_of(mix)), size)
    for k in mix.anchor:
        anchor.add(k, models[k], received)
    clients = sorted(mix.shares.keys() - set(mix.anchor))
    mean = torch.stack([models[k][:size] for k in mix.anchor]).mean(0)
    bounded = (
        anchor.bound(k, scaled(models[k], received, mix.step.get(k, 1.0), size), received, mix.within) for k in clients
    )
    products = products_of(torch.stack([one[:size] - mean for one in bounded]))
    lengths = products.diagonal().sqrt()
    cosines = (products / (lengths[:, None] * lengths).clamp(min=1e-300)).nan_to_num(1.0, 1.0, 1.0).tolist()
    return {(clients[i], clients[j]): cosines[i][j] for i, j in combinations(range(len(clients)), 2)}
