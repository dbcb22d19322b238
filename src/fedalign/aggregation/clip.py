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
        check_length(self.length)

    def apply(self, update: torch.Tensor, context: UpdateContext) -> torch.Tensor:
        """Return the update, scaled down if it is longer than allowed."""
        return shortened(update, self.length)


def check_length(length: float) -> None:
    """Raise :class:`FedalignError` unless a length to clip updates to is a positive, finite number."""
    real = isinstance(length, numbers.Real) and not isinstance(length, bool)
    if not real or not 0 < length < math.inf:
        raise FedalignError(f"the length to clip an update to must be positive, not {length!r}")


def shortened(update: torch.Tensor, length: float) -> torch.Tensor:
    """Return an update, scaled down if it is longer than ``length``."""
    norm: torch.Tensor = torch.linalg.vector_norm(update.double())
    return update * shrink_factors(norm, length).to(update.dtype)


def shrink_factors(lengths: torch.Tensor, most: float | torch.Tensor) -> torch.Tensor:
    """Return what vectors of these lengths are multiplied by, so that none is longer than ``most``.

    >>> shrink_factors(torch.tensor([1.0, 4.0, 0.0]), 2.0)
    tensor([1.0000, 0.5000, 1.0000])
    """
    return (most / lengths.clamp(min=1e-30)).clamp(max=1.0)
