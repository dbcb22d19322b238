"""A client step that clips updates."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import torch

from fedalign.aggregation.update_steps import ClientStep, UpdateContext
from fedalign.errors import FedalignError


@dataclass(frozen=True)
class ClipUpdate(ClientStep):
    """Shorten an update to at most ``length``; its direction stays.

    >>> context = UpdateContext(seed=0, round=0, client=0)
    >>> ClipUpdate(length=1.0).apply(torch.tensor([3.0, 4.0]), context)
    tensor([0.6000, 0.8000])
    >>> ClipUpdate(length=10.0).apply(torch.tensor([3.0, 4.0]), context)
    tensor([3., 4.])
    """

    length: float

    def __post_init__(self) -> None:
        real = isinstance(self.length, numbers.Real) and not isinstance(self.length, bool)
        if not real or not 0 < self.length < math.inf:
            raise FedalignError(f"the length to clip an update to must be positive, not {self.length!r}")

    def apply(self, update: torch.Tensor, context: UpdateContext) -> torch.Tensor:
        """Return the update, scaled down if it is longer than allowed."""
        norm: torch.Tensor = torch.linalg.vector_norm(update.double())
        shrink = (self.length / norm.clamp(min=1e-30)).clamp(max=1.0)
        return update * shrink.to(update.dtype)
