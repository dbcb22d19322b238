"""The batches of a client's local steps. Both engines take them from here, so they train on the same ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedalign.errors import FedalignError
from fedalign.simulation.engine.jobs import Data, TrainJob
from fedalign.training.randomness import Purpose, hashed, permutations, permutations_on

_KEPT = 64  # outlines, of the clients that were trained together most recently


class Outline:
    """The part of several jobs' batches that is the same every round: their rows, and every step's sample count."""

    def __init__(self, jobs: Sequence[TrainJob], data: Data) -> None:
        local = jobs[0].local
        self.lengths = np.array([len(job.rows) for job in jobs], np.int64)
        self.steps = np.array([job.steps for job in jobs], np.int64)
        per_epoch = np.array([local.batches_per_epoch(n) for n in self.lengths.tolist()], np.int64)
        self.epochs = int(self.steps.max() if local.fresh else np.ceil(self.steps / per_epoch).max())
        self.longest = int(self.lengths.max())
        self.size = local.width_for(self.longest)
        self.width = int(per_epoch.max()) * self.size
        owned = np.zeros((len(jobs), self.width), np.int64)
        for j, job in enumerate(jobs):
            owned[j, : self.lengths[j]] = data.rows(job.pool, job.rows)
        self.owned = torch.from_numpy(owned).to(data.device)
        step = np.arange(int(self.steps.max()))[None, :]
        epoch, place = step // per_epoch[:, None], step % per_epoch[:, None]
        if local.fresh:  # the first batch of a pass of its own
            epoch, place = np.broadcast_to(step, epoch.shape), np.zeros_like(place)
        self.alike = bool(not local.fresh and (per_epoch == per_epoch[0]).all() and (self.steps == self.steps[0]).all())
        self.where = torch.from_numpy(np.stack([np.minimum(epoch, self.epochs - 1), place]))
        self.counts = np.minimum(self.size, self.lengths[:, None] - place * self.size)
        self.counts[step >= self.steps[:, None]] = 0
        self._data = data

    @cached_property
    def weights(self) -> torch.Tensor:
        """Give each sample's weight in its batch (steps × jobs × samples): one over the count; zero for padding."""
        counts = torch.from_numpy(self.counts.T.copy()).to(self._data.device)
        real = torch.arange(self.size, device=self._data.device) < counts[:, :, None]
        return real.to(self._data.dtype) / counts.clamp(min=1)[:, :, None]

    def in_order(self, order: torch.Tensor) -> torch.Tensor:
        """Cut every epoch's rows (jobs × epochs × rows) into the steps' (jobs × steps × samples)."""
        table = order.reshape(len(order), self.epochs, -1, self.size)
        if self.alike:
            return table.reshape(len(order), -1, self.size)[:, : int(self.steps[0])]
        where = self.where.to(order.device)
        return table[torch.arange(len(order), device=order.device)[:, None], where[0], where[1]]


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of several jobs: ``rows[j, s, :counts[j, s]]`` are job j's samples in step s, at ``rates[j, s]``."""

    rows: torch.Tensor  # on the data's device
    rates: npt.NDArray[np.float64]
    outline: Outline

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Give the number of samples of each job in each step."""
        return self.outline.counts


class Outlines:
    """Caches the outlines of the clients trained most recently: on a GPU, making one takes as long as a step."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, ...], tuple[Outline, object]] = OrderedDict()

    def __call__(self, jobs: Sequence[TrainJob], data: Data) -> Outline:
        """Find or make the outline of jobs that share their local work."""
        key = (id(jobs[0].local), *(id(job.rows) for job in jobs), *{id(job.pool) for job in jobs})
        if key in self._known:
            self._known.move_to_end(key)
        else:  # the objects are kept alive, so that their ids stay unique
            self._known[key] = Outline(jobs, data), [(job.local, job.rows, job.pool) for job in jobs]
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return self._known[key][0]


def batches_for(jobs: Sequence[TrainJob], data: Data, outline: Outline | None = None) -> Batches:
    """Make the batches of jobs that share their local work. A job's batches don't depend on the other jobs."""
    outline = outline or Outline(jobs, data)
    if jobs[0].local.batch is None:
        order = outline.owned[:, None, :].expand(-1, outline.epochs, -1)
    else:
        order = _shuffled(jobs, data, outline)
    return Batches(outline.in_order(order), _rates(jobs, outline.steps), outline)


def _shuffled(jobs: Sequence[TrainJob], data: Data, outline: Outline) -> torch.Tensor:
    epochs, width, longest = outline.epochs, outline.width, outline.longest
    who = np.array([(job.seed, job.round, job.client) for job in jobs], np.int64)
    keys = hashed(who[:, 0:1], Purpose.BATCHES, who[:, 1:2], who[:, 2:3], np.arange(epochs)[None, :]).reshape(-1)
    lengths = np.repeat(outline.lengths, epochs)
    if data.device.type == "cpu":
        places = torch.from_numpy(permutations(keys, lengths))
    else:
        places = permutations_on(data.device, keys, lengths)
    # Beyond a row's length a permutation is undefined; the counts exclude those entries.
    places = places.view(len(jobs), -1).clamp_(max=width - 1)
    rows = outline.owned.gather(1, places).view(len(jobs), epochs, longest)
    if longest == width:
        return rows
    order = torch.zeros((len(jobs), epochs, width), dtype=torch.int64, device=data.device)
    order[:, :, :longest] = rows
    return order


def _rates(jobs: Sequence[TrainJob], steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Give every job's rate in every step (jobs × steps)."""
    local, round, rounds = jobs[0].local, jobs[0].round, jobs[0].rounds
    most = int(steps.max())
    if local.schedule.counts == "rounds":
        if all((job.round, job.rounds) == (round, rounds) for job in jobs):
            return np.full((len(jobs), most), local.rate(round, rounds, 0, 1))
        return np.repeat([[local.rate(job.round, job.rounds, 0, 1)] for job in jobs], most, axis=1)
    rates = np.zeros((len(jobs), most))
    for j, job in enumerate(jobs):
        n = int(steps[j])
        rates[j, :n] = [local.rate(job.round, job.rounds, s, n) for s in range(n)]
        if not (np.isfinite(rates[j, :n]).all() and rates[j, :n].min() > 0):
            raise FedalignError(f"lr is not positive in some local step of round {job.round}: {rates[j, :n].min()}")
    return rates
