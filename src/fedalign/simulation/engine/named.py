"""The engines by name."""

from __future__ import annotations

from typing import Literal

from torch import nn

from fedalign.errors import FedalignError, nearest
from fedalign.simulation.engine.batched import BatchedEngine
from fedalign.simulation.engine.jobs import Data, Engine
from fedalign.simulation.engine.reference import ReferenceEngine
from fedalign.training.losses import PerSampleLoss

EngineName = Literal["batched", "reference"]


def make_engine(
    name: EngineName, template: nn.Module, loss: PerSampleLoss, data: Data, chunk: int | None, *, accuracy: bool
) -> Engine:
    """Make the engine of a name; ``chunk`` is for the batched one. Raises :class:`FedalignError` for another name."""
    if name == "batched":
        return BatchedEngine(template, loss, data, chunk, accuracy=accuracy)
    if name == "reference":
        return ReferenceEngine(template, loss, data, accuracy=accuracy)
    raise FedalignError(f"unknown engine {name!r}; {nearest(str(name), ['batched', 'reference'])}")
