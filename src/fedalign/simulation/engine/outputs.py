"""Reads what models give for samples, for both engines."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn
from torch.func import functional_call

from fedalign.data.federation import Rows
from fedalign.data.samples import Pool
from fedalign.simulation.engine.jobs import Data
from fedalign.simulation.engine.layout import Layout

_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}  # of inputs and activations in one pass
_ACTIVATIONS = 10  # memory of a pass, in multiples of its input


def samples_at_once(data: Data) -> int:
    """Return how many samples of this size a model takes in one pass."""
    allowed = _BYTES.get(data.device.type, _BYTES["cpu"])
    return max(1, allowed // (4 * data.features * _ACTIVATIONS))


class OutputReader:
    """Gives models' outputs in evaluation mode, with the targets, on the CPU."""

    def __init__(self, template: nn.Module, layout: Layout, data: Data) -> None:
        self._module = copy.deepcopy(template).to(data.device).eval()
        self._layout, self._data, self._at_once = layout, data, samples_at_once(data)
        self.device = data.device

    def read(
        self, models: Mapping[int, torch.Tensor], pool: Pool, rows: Mapping[int, Rows]
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return outputs and targets of every client's rows, by client; ``models`` holds each client's flat model."""
        found = {}
        with torch.no_grad():
            for k, own in rows.items():
                weights = self._layout.unflatten(models[k])
                place = torch.from_numpy(self._data.rows(pool, own)).to(self._data.device)
                parts = []
                for part in torch.split(place, self._at_once):
                    x, y = self._data.batch(part)
                    parts.append((functional_call(self._module, weights, (x,)).cpu(), y.cpu()))
                outputs, targets = zip(*parts, strict=True)
                found[k] = torch.cat(outputs), torch.cat(targets)
        return found
