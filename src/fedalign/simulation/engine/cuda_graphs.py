"""Local steps as CUDA graphs: recorded once for a shape, replayed with new models, batches and rates.

A step of a small model is a dozen kernels of a few microseconds each; launching them from Python takes far longer than
running them. A graph holds several steps of all stacked clients, reads its inputs from fixed buffers, and costs one
launch. Stacks are padded to a few heights, so that a changing set of admitted clients doesn't need a new graph; a
padded client, or one that has finished, has weight and rate zero, so its model doesn't change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fedalign.errors import FederationWarning
from fedalign.simulation.engine.batches import Outlines, batches_for
from fedalign.simulation.engine.draws import draw_keys
from fedalign.simulation.engine.jobs import Data, TrainJob
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.engine.stacked_optimizer import StackedOptimizer
from fedalign.training.optimizer import LocalOptimizer

_BYTES = 1 << 30  # of features gathered in one graph
_KEPT = 16  # graphs, of the shapes used last
_HEIGHT = 4  # stacks are padded to a multiple of this


class Steps(NamedTuple):
    """The buffers of some steps (steps × clients × …): features, labels, the samples' weights, the clients' rates."""

    x: torch.Tensor
    y: torch.Tensor
    weights: torch.Tensor
    rates: torch.Tensor
    scaled: torch.Tensor  # weights times rates
    keys: torch.Tensor  # the clients' keys for the model's random draws; of no steps for models that draw nothing


#: Do step k on stacked parameters, in place.
StepFunction = Callable[[Sequence[torch.Tensor], StackedOptimizer, Steps, int], None]


class StepGraph:
    """A recorded CUDA graph of some local steps of a stack of clients, with its buffers."""

    def __init__(
        self,
        step: StepFunction,
        layout: Layout,
        local: LocalOptimizer,
        data: Data,
        size: tuple[int, int, int],
        pool: Any,
        *,
        draws: bool = False,
        only: tuple[int, ...] | None = None,
    ) -> None:
        self.steps, clients, _ = size
        self._data = data
        self.tensors = [
            torch.zeros((clients, *shape), dtype=dtype, device=data.device)
            for shape, dtype in zip(layout.shapes, layout.types, strict=True)
        ]
        self._rows = torch.zeros(size, dtype=torch.int64, device=data.device)
        self._weights = torch.zeros(size, dtype=data.dtype, device=data.device)
        self._rates = torch.zeros(size[:2], dtype=data.dtype, device=data.device)
        self._keys = torch.zeros(size[:2] if draws else (0, 0), dtype=torch.int64, device=data.device)
        self._optimizer = StackedOptimizer(local, self.tensors[: layout.trainable], only)
        self._step = step
        stream = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries allocate memory and choose kernels here, outside the recording
                self._do()
        torch.cuda.current_stream(data.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(self._graph, pool=pool):
            self._do()

    def _do(self) -> None:
        x, y = self._data.batch(self._rows)
        scaled = self._weights * self._rates.unsqueeze(-1)
        steps = Steps(x, y, self._weights, self._rates, scaled, self._keys)
        for k in range(self.steps):
            self._step(self.tensors, self._optimizer, steps, k)

    def run(
        self,
        start: Sequence[torch.Tensor],
        jobs: Sequence[TrainJob],
        rows: torch.Tensor,
        weights: torch.Tensor,
        rates: torch.Tensor,
        keys: torch.Tensor,
    ) -> None:
        """Train from ``start`` through all steps of the tables (steps × clients × …); results are in ``tensors``."""
        clients = len(start[0])
        for held, given in zip(self.tensors, start, strict=True):
            held[:clients].copy_(given)
            held[clients:].zero_()
        self._optimizer.reset()
        self._optimizer.prepare(jobs)
        for first in range(0, len(rows), self.steps):
            part = slice(first, first + self.steps)
            tables = [(self._rows, rows), (self._weights, weights), (self._rates, rates)]
            if len(keys):
                tables.append((self._keys, keys))
            for buffer, table in tables:
                done = table[part]
                buffer.zero_()
                buffer[: len(done), :clients].copy_(done)
            self._graph.replay()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector: if it frees an older graph during a recording, the recording is invalid."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _options(local: LocalOptimizer) -> tuple[str, ...]:
    """Give the options that a recorded step depends on: all but those that come in as buffers or as shapes."""
    outside = {"lr", "epochs", "steps", "batch_size", "fresh", "schedule"}
    return tuple(repr(getattr(local, f.name)) for f in dataclasses.fields(local) if f.name not in outside)


class GraphCache:
    """Records graphs for the shapes that occur, and keeps the most recently used."""

    def __init__(self, step: StepFunction, layout: Layout, data: Data, *, draws: bool = False) -> None:
        self._step, self._layout, self._data, self._draws = step, layout, data, draws
        self._why_not: str | None = None
        self._outlines = Outlines()
        self._graphs: OrderedDict[tuple[object, ...], StepGraph] = OrderedDict()
        # All graphs share the memory of intermediate results: they run one after another, and none needs what
        # another left there.
        self._pool = torch.cuda.graph_pool_handle()

    def train(self, models: torch.Tensor, jobs: Sequence[TrainJob]) -> torch.Tensor | None:
        """Do every job's local work from the stacked flat ``models``; None if its steps cannot be recorded."""
        data = self._data
        if self._why_not is not None:
            return None
        batches = batches_for(jobs, data, self._outlines(jobs, data))
        rows, weights = batches.rows.transpose(0, 1), batches.outline.weights
        rates = torch.from_numpy(np.where(batches.counts > 0, batches.rates, 0.0).T.copy()).to(data.device, data.dtype)
        keys = draw_keys(jobs, data.device).t() if self._draws else rates.new_zeros((0, 0), dtype=torch.int64)
        try:
            graph = self._graph_for(jobs[0], len(jobs), rows.shape[0], rows.shape[2])
        except RuntimeError as error:
            self._why_not = (str(error).strip().splitlines() or [type(error).__name__])[0]
            warnings.warn(
                f"this model's steps cannot become a CUDA graph ({self._why_not}); they are launched one by one",
                FederationWarning,
                stacklevel=2,
            )
            return None
        graph.run(list(self._layout.unflatten(models).values()), jobs, rows, weights, rates, keys)
        return self._layout.join([t[: len(jobs)] for t in graph.tensors])

    def _graph_for(self, job: TrainJob, jobs: int, steps: int, width: int) -> StepGraph:
        local, only = job.local, job.only
        clients = jobs if jobs < _HEIGHT else -(-jobs // _HEIGHT) * _HEIGHT
        fit = max(1, _BYTES // (4 * clients * width * self._data.features))
        parts = -(-steps // min(steps, fit))
        size = (-(-steps // parts), clients, width)
        key = (*size, type(local), *_options(local), only)
        graph = self._graphs.pop(key, None)
        if graph is None:
            graph = StepGraph(
                self._step, self._layout, local, self._data, size, self._pool, draws=self._draws, only=only
            )
        self._graphs[key] = graph
        while len(self._graphs) > _KEPT:
            self._graphs.popitem(last=False)
        return graph
