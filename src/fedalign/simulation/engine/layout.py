"""A model as one flat vector: trainable parameters first, then everything else (buffers, frozen parameters).

Averaging, checkpoints and stacking need no more than that vector. Integer buffers (BatchNorm's batch counter) travel
as numbers of the parameters' type and are rounded when they are put back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from fedalign.errors import FedalignError


@dataclass(frozen=True)
class RunningStatistics:
    """Where the running statistics of a normalisation layer lie in the flat vector.

    ``counter`` is the place of the layer's batch counter, None if it has none. ``momentum`` None: the statistics are
    the plain mean over all batches, which the counter counts.
    """

    layer: str
    mean: slice
    variance: slice
    counter: int | None
    momentum: float | None


class Layout:
    """Where each of a module's tensors lies in the flat vector.

    >>> layout = Layout(nn.Linear(3, 2))
    >>> layout.names, layout.size
    (('weight', 'bias'), 8)
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        trainable = {name: p for name, p in parameters.items() if p.requires_grad}
        if not trainable:
            raise FedalignError("the model has no trainable parameters")
        rest = {name: p for name, p in parameters.items() if not p.requires_grad} | dict(module.named_buffers())
        tensors = trainable | rest
        self.dtype = next(iter(trainable.values())).dtype
        mixed = [name for name, t in tensors.items() if t.is_floating_point() and t.dtype != self.dtype]
        if mixed:
            raise FedalignError(f"the model mixes types: {mixed[0]} is {tensors[mixed[0]].dtype}, others {self.dtype}")
        self.names = tuple(tensors)
        self.shapes = tuple(tuple(t.shape) for t in tensors.values())
        self.types = tuple(t.dtype for t in tensors.values())
        self.sizes = tuple(math.prod(shape) for shape in self.shapes)
        self.trainable = len(trainable)
        self.size = sum(self.sizes)
        self.trainable_size = sum(self.sizes[: self.trainable])
        self.statistics = tuple(self._statistics(module))

    @property
    def places(self) -> dict[str, slice]:
        """The part of the flat vector that each tensor takes.

        >>> Layout(nn.Linear(3, 2)).places["bias"]
        slice(6, 8, None)
        """
        ends = list(accumulate(self.sizes))
        starts = [end - size for end, size in zip(ends, self.sizes, strict=True)]
        return dict(zip(self.names, map(slice, starts, ends), strict=True))

    def _statistics(self, module: nn.Module) -> Iterator[RunningStatistics]:
        """Find running statistics by the names that PyTorch's layers and those of other libraries give them."""
        places = self.places
        for prefix, layer in module.named_modules():
            mean, variance, counter = (
                places.get(f"{prefix}.{name}" if prefix else name)
                for name in ("running_mean", "running_var", "num_batches_tracked")
            )
            if mean is not None and variance is not None and mean.stop - mean.start == variance.stop - variance.start:
                momentum = getattr(layer, "momentum", 0.1)
                yield RunningStatistics(prefix, mean, variance, None if counter is None else counter.start, momentum)

    def flatten(self, module: nn.Module) -> torch.Tensor:
        """Copy a module's tensors into a flat vector."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        return torch.cat([tensors[name].detach().reshape(-1).to(self.dtype) for name in self.names])

    def pieces(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.dtype]]:
        """Give views of a flat vector, or of a stack of them (clients first), tensor by tensor."""
        lead = flat.shape[:-1]
        split = torch.split(flat, list(self.sizes), dim=-1)
        for name, piece, shape, dtype in zip(self.names, split, self.shapes, self.types, strict=True):
            yield name, piece.reshape(lead + shape), dtype

    def unflatten(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Give named tensors with their own types; of floating type, they are views."""
        return {name: _cast(piece, dtype) for name, piece, dtype in self.pieces(flat)}

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put stacked tensors (in the order of ``names``) back into a stack of flat vectors."""
        return torch.cat([t.reshape(t.shape[0], -1).to(self.dtype) for t in tensors], dim=1)

    def load(self, module: nn.Module, flat: torch.Tensor) -> None:
        """Copy a flat vector into a module."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        with torch.no_grad():
            for name, piece, dtype in self.pieces(flat):
                tensors[name].copy_(_cast(piece, dtype))


def _cast(piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return piece if dtype.is_floating_point else piece.round().to(dtype)
