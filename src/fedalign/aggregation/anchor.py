"""Trusted clients of an aggregate, which bound what the other clients' updates may do to it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fedalign.aggregation.rows import weighted_sum
from fedalign.protocol.messages import Mix


class Anchor:
    """Trusted clients of a mix, which bound what the other clients' updates may do.

    ``weights`` holds each trusted client's part of all their shares. ``size`` is the number of trainable numbers.

    >>> anchor = Anchor({0: 0.75, 1: 0.25}, size=1)
    >>> anchor.add(0, torch.tensor([1.0, 8.0]), torch.zeros(2))
    >>> anchor.add(1, torch.tensor([3.0, 4.0]), torch.zeros(2))
    >>> anchor.bound(2, torch.tensor([99.0, 99.0]), torch.zeros(2), within=1.0)
    tensor([3.4142, 7.0000])
    """

    def __init__(self, weights: Mapping[int, float], size: int) -> None:
        self._weights, self._size = weights, size
        self._models: dict[int, torch.Tensor] = {}
        self._bounds: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def weights_of(mix: Mix) -> tuple[tuple[int, float], ...]:
        """Return the trusted clients of a mix with their weights, which are alike in mixes of the same proportions."""
        total = math.fsum(mix.shares[k] for k in mix.anchor)
        return tuple((k, round(mix.shares[k] / total, 12)) for k in mix.anchor)

    @property
    def complete(self) -> bool:
        """Whether all trusted clients' models are there."""
        return len(self._models) == len(self._weights)

    def add(self, client: int, model: torch.Tensor, received: torch.Tensor) -> None:
        """Take a model, if it is a trusted client's."""
        if client in self._weights:
            self._models[client] = model

    def bound(self, client: int, model: torch.Tensor, received: torch.Tensor, within: float) -> torch.Tensor:
        """Return a client's model with the anchor's mean statistics, and its update within the anchor's bounds.

        A trusted client's model stays as it is. The bounds of a coordinate are the mean of the anchor's updates, plus
        or minus ``within`` standard deviations; one update alone has a deviation of its own size.
        """
        if client in self._weights:
            return model
        centre, spread, statistics = self._bounds = self._bounds or self._measured(received)
        moved = model.clone()
        moved[self._size :] = statistics
        if within < math.inf:
            update = moved[: self._size] - received[: self._size]
            update = torch.maximum(torch.minimum(update, centre + within * spread), centre - within * spread)
            moved[: self._size] = received[: self._size] + update
        return moved

    def _measured(self, received: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the mean and the standard deviation of the anchor's updates, and its weighted mean statistics."""
        models = torch.stack([self._models[k] for k in self._weights])
        updates = models[:, : self._size] - received[: self._size]
        centre = updates.mean(0)
        spread = updates.std(0) if len(updates) > 1 else centre.abs()
        return centre, spread, weighted_sum(models[:, self._size :], models.new_tensor(list(self._weights.values())))
