"""Checks of the numbers in a free client's model that training does not move: buffers and frozen parameters.

The length of an update does not count them, and one wrong number there can end a run: a negative variance makes every
later loss NaN. Honest training keeps three properties, and an update without one of them is refused:

- A variance and a batch counter are 0 or more.
- A running statistic is a mean of the statistic received and those of the client's batches. So where it grew, it is on
  the scale of the client's activations: at most ``WIDEST`` times the scale of the priority clients', layer by layer.
  Honest clients of other distributions, trained for long with a large learning rate, reach 10 times that scale.
- A frozen parameter, or a constant buffer, stays as it was. What no priority client changed, no free client changes.

How much a counter grows depends on how much data a client has, so that is no reason to refuse it. The exception are
layers with ``momentum=None``, where a giant counter would freeze the statistics for good. Other buffers must be finite,
as all numbers of an update; no more is known of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedalign.simulation.engine.layout import Layout

WIDEST = 100.0  #: times the priority clients' scale that a free client's means and standard deviations may reach
MOST_STEPS = 1000.0  #: times the priority clients' steps that a counter may grow in a layer with ``momentum=None``
LARGEST_COUNT = 2.0**53  #: larger counts are not exact, and soon they do not fit an integer


@dataclass(frozen=True)
class LayerFacts:
    """What the checks look at in the running statistics of one layer.

    ``lowest``: the lowest variance. ``widest``: the largest mean (without its sign) or standard deviation among those
    that grew. ``scale``: the same of the batches that the client trained on. ``count``: the batch counter, and
    ``steps``: by how much it grew.
    """

    lowest: float
    widest: float
    scale: float
    count: float
    steps: float
    averages: bool = False  #: the layer has ``momentum=None``


@dataclass(frozen=True)
class BufferFacts:
    """What the checks look at: the running statistics by layer, and the other tensors that the client changed."""

    layers: Mapping[str, LayerFacts]
    changed: frozenset[str] = frozenset()


class BufferReader:
    """Reads from flat models what the checks look at; ``reads_something`` is False for models without such numbers."""

    def __init__(self, layout: Layout) -> None:
        self._layers = layout.statistics
        covered = {place.start for layer in self._layers for place in (layer.mean, layer.variance)}
        covered |= {layer.counter for layer in self._layers if layer.counter is not None}
        rest = [(name, place) for name, place in layout.places.items() if place.start >= layout.trainable_size]
        self._others = [(n, place) for n, place in rest if place.start not in covered and place.stop > place.start]
        types = dict(zip(layout.names, layout.types, strict=True))
        # Integers travel as floating-point numbers, whose mean is not exact; clients round them.
        self._exact = [0.0 if types[name].is_floating_point else 0.5 for name, _ in self._others]
        self.reads_something = bool(self._layers or self._others)
        self._index = {
            "means": _join([layer.mean for layer in self._layers]),
            "variances": _join([layer.variance for layer in self._layers]),
            "layer": _numbered([layer.mean for layer in self._layers]),
            "counters": torch.tensor([layer.counter or 0 for layer in self._layers], dtype=torch.long),
            "counts": torch.tensor([layer.counter is not None for layer in self._layers]),
            "keeps": torch.tensor([1 - (layer.momentum or 0.0) for layer in self._layers], dtype=torch.float64),
            "averages": torch.tensor([layer.momentum is None for layer in self._layers]),
        }

    def summary(self, model: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Compare a client's model with the one it received; the numbers stay on their device, for :meth:`facts`."""
        at = self._on(model.device)
        parts = []
        if self._layers:
            mean, variance = model[at["means"]].double(), model[at["variances"]].double()
            old_mean, old_variance = received[at["means"]].double(), received[at["variances"]].double()
            count, old_count = (torch.where(at["counts"], m[at["counters"]].double(), 0.0) for m in (model, received))
            steps = (count - old_count).round()  # the counter received is a mean, and clients round it
            kept = torch.where(at["averages"], old_count / count, at["keeps"] ** steps)
            # Without a step that was counted, the statistics themselves stand for those of the batches.
            new = torch.where((steps >= 1) & (kept < 1), 1 - kept, 1.0)[at["layer"]]
            batch_mean = old_mean + (mean - old_mean) / new
            batch_variance = (old_variance + (variance - old_variance) / new).clamp(min=0)
            wide = torch.maximum(
                torch.where(mean.abs() > old_mean.abs(), mean.abs(), 0.0),
                torch.where(variance > old_variance, variance, 0.0).clamp(min=0).sqrt(),
            )
            scale = torch.maximum(batch_mean.abs(), batch_variance.sqrt())
            parts += [_by(at["layer"], variance, len(count), "amin"), _by(at["layer"], wide, len(count))]
            parts += [_by(at["layer"], scale, len(count)), count, steps]
        if self._others:
            # One after another: frozen parameters may be nearly the whole model.
            moves = [(model[place] - received[place]).abs().amax() for _, place in self._others]
            parts.append(torch.stack(moves).double())
        return torch.cat(parts)

    def facts(self, numbers: Sequence[float]) -> BufferFacts:
        """Name the numbers of a :meth:`summary` that was read from its device."""
        many = len(self._layers)
        lowest, widest, scale, count, steps = (numbers[i * many : (i + 1) * many] for i in range(5))
        layers = {
            layer.layer: LayerFacts(lowest[i], widest[i], scale[i], count[i], steps[i], layer.momentum is None)
            for i, layer in enumerate(self._layers)
        }
        moves = zip(self._others, numbers[5 * many :], self._exact, strict=True)
        return BufferFacts(layers, frozenset(name for (name, _), move, exact in moves if move > exact))

    def read(self, model: torch.Tensor, received: torch.Tensor) -> BufferFacts | None:
        """Return the facts of one model at once; None if there is nothing to read."""
        return self.facts(self.summary(model, received).tolist()) if self.reads_something else None

    def _on(self, device: torch.device) -> dict[str, torch.Tensor]:
        if self._index["layer"].device != device:
            self._index = {name: index.to(device) for name, index in self._index.items()}
        return self._index


def wrong_buffers(own: BufferFacts, priority: Sequence[BufferFacts]) -> str | None:
    """Return why a free client's buffers are refused, given those of the priority clients; None if they are not.

    >>> usual = BufferFacts({"norm": LayerFacts(lowest=0.5, widest=1.0, scale=1.0, count=8, steps=4)})
    >>> wrong_buffers(BufferFacts({"norm": LayerFacts(-2.0, 1.0, 1.0, 8, 4)}), [usual])
    'its running variance in the layer norm is negative: -2'
    """
    for name, layer in own.layers.items():
        others = [facts.layers[name] for facts in priority]
        if (wrong := _wrong_layer(layer, others)) is not None:
            return wrong.format(layer=f"the layer {name}" if name else "the model")
    if priority:
        for name in sorted(own.changed.difference(*(facts.changed for facts in priority))):
            return f"it changed {name}, which no priority client changed"
    return None


def _wrong_layer(own: LayerFacts, priority: Sequence[LayerFacts]) -> str | None:
    if own.lowest < 0:
        return f"its running variance in {{layer}} is negative: {own.lowest:.3g}"
    if not 0 <= own.count <= LARGEST_COUNT:
        return f"its batch counter in {{layer}} is {own.count:.3g}"
    if not priority:
        return None
    scale = max(other.scale for other in priority)
    scale = scale if 0 < scale < math.inf else 1.0  # as a new layer has
    if own.widest > WIDEST * scale:
        return f"its running statistics in {{layer}} are {own.widest / scale:.3g} times those of the priority clients"
    steps = max(1.0, *(other.steps for other in priority))
    if own.averages and own.steps > MOST_STEPS * steps:
        return f"its batch counter in {{layer}} grew {own.steps / steps:.3g} times as much as the priority clients'"
    return None


def _join(places: Sequence[slice]) -> torch.Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.long), *(torch.arange(p.start, p.stop) for p in places)])


def _numbered(places: Sequence[slice]) -> torch.Tensor:
    """Return, for each number of :func:`_join`, which of the places it is in."""
    sizes = torch.tensor([place.stop - place.start for place in places], dtype=torch.long)
    return torch.repeat_interleave(torch.arange(len(places)), sizes)


def _by(group: torch.Tensor, values: torch.Tensor, groups: int, reduce: str = "amax") -> torch.Tensor:
    return values.new_zeros(groups).scatter_reduce(0, group, values, reduce, include_self=False)
