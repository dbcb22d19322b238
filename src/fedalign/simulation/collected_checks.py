"""The checks of updates in a simulation. On a GPU every reading waits for the work, so all is read at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedalign.aggregation.buffer_checks import BufferReader
from fedalign.aggregation.update_checks import UpdateFacts, length_of, refusals
from fedalign.simulation.engine.jobs import Trained
from fedalign.simulation.live_run import LiveRun


class CollectedChecks:
    """Collects what the checks look at, for updates of several runs, and reads it all at once."""

    def __init__(self, runs: Sequence[LiveRun], buffers: BufferReader) -> None:
        self._runs, self._reader = runs, buffers
        self._places: list[tuple[int, int]] = []
        self._finite: list[torch.Tensor] = []
        self._lengths: dict[tuple[int, int], torch.Tensor] = {}
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}

    def add(self, i: int, k: int, trained: Trained) -> None:
        """Take what is needed of an update of run i, not its model: a simulation never holds all of them."""
        self._places.append((i, k))
        self._finite.append(trained.finite)
        run = self._runs[i]
        if run.received is None:
            return
        if run.server_steps:
            self._lengths[i, k] = length_of(trained.model, run.received, run.trainable)
        if self._reader.reads_something:
            self._buffers[i, k] = self._reader.summary(trained.model, run.received)

    def refusals(self) -> list[dict[int, str]]:
        """Return, for each run, the refused clients with the reasons."""
        finite = dict(zip(self._places, read_flags(self._finite), strict=True))
        lengths = dict(zip(self._lengths, _values(list(self._lengths.values())), strict=True))
        summaries = torch.stack(list(self._buffers.values())).tolist() if self._buffers else []
        buffers = {place: self._reader.facts(one) for place, one in zip(self._buffers, summaries, strict=True)}
        facts: list[dict[int, UpdateFacts]] = [{} for _ in self._runs]
        for i, k in self._places:
            facts[i][k] = UpdateFacts(finite[i, k], lengths.get((i, k), 0.0), buffers.get((i, k)))
        return [
            refusals(found, [k for k in found if run.federation.clients[k].priority], run.server_steps)
            for run, found in zip(self._runs, facts, strict=True)
        ]


def read_flags(flags: Sequence[torch.Tensor]) -> list[bool]:
    """Return flags, each a tensor of one number, as Python's; they are read from their device together."""
    return [bool(flag) for flag in _values(flags)]


def _values(numbers: Sequence[torch.Tensor]) -> list[float]:
    return torch.stack(list(numbers)).tolist() if numbers else []
