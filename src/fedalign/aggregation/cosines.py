"""The cosines of clients' updates with each other, and with the server's last step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch

from fedalign.aggregation.rows import products_of


def update_cosines(
    clients: Sequence[int],
    models: Mapping[int, torch.Tensor],
    received: torch.Tensor,
    previous: torch.Tensor | None,
    size: int,
) -> dict[tuple[int, int], float]:
    """Return the cosine of every two updates; the server's step from ``previous`` to ``received`` is client −1.

    ``size`` is the number of trainable numbers, the first ones of a model. An update of length 0 has cosines of 0.

    >>> models = {0: torch.tensor([1.0, 0.0]), 1: torch.tensor([2.0, 0.0])}
    >>> update_cosines([0, 1], models, torch.zeros(2), torch.tensor([0.0, 1.0]), size=2)
    {(-1, 0): 0.0, (-1, 1): 0.0, (0, 1): 1.0}
    """
    known = {k: models[k][:size] - received[:size] for k in sorted(clients)}
    if previous is not None:
        known = {-1: received[:size] - previous[:size], **known}
    products = products_of(torch.stack(list(known.values())))
    lengths = products.diagonal().sqrt()
    cosines = (products / (lengths[:, None] * lengths).clamp(min=1e-300)).tolist()
    names = list(known)
    # Adding 0 turns −0 into 0.
    return {(names[i], names[j]): cosines[i][j] + 0.0 for i, j in combinations(range(len(names)), 2)}
