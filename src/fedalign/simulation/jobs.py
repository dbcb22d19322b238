"""What the engines are asked to do, and the order in which a client's samples come.

Both engines read batches from here, so they see the same samples in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedalign.errors import FedalignError
from fedalign.federation import Pool, Rows
from fedalign.local import LocalSGD
from fedalign.randomness import Purpose, hashed, permutations
from fedalign.rules import Measure


@dataclass(frozen=True, eq=False)
class EvalJob:
    """Measure a model (a flat vector) on rows of a pool."""

    model: torch.Tensor
    pool: Pool
    rows: Rows


@dataclass(frozen=True, eq=False)
class TrainJob:
    """Train a model on a client's rows; ``seed``, ``round`` and ``client`` fix the order of its batches."""

    model: torch.Tensor
    pool: Pool
    rows: Rows
    local: LocalSGD
    seed: int
    round: int
    rounds: int
    client: int

    @property
    def steps(self) -> int:
        """How many local steps this job takes."""
        return self.local.steps_for(len(self.rows))

    @property
    def width(self) -> int:
        """How wide this job's batches are when it is stacked."""
        return self.local.width_for(len(self.rows))


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model, and whether all of it is finite."""

    model: torch.Tensor
    finite: bool


class Engine(Protocol):
    """Evaluates and trains; the two implementations agree to rounding."""

    device: torch.device

    def evaluate(self, jobs: Sequence[EvalJob]) -> list[Measure]:
        """Measure, one result per job."""
        ...

    def train(self, jobs: Sequence[TrainJob]) -> list[Trained]:
        """Train, one result per job."""
        ...


class Data:
    """The pools of all runs, once, on the engine's device; a batch is gathered and normalised on the fly."""

    def __init__(self, pools: Sequence[Pool], device: torch.device, dtype: torch.dtype) -> None:
        distinct = list({id(pool): pool for pool in pools}.values())
        self._offsets: dict[int, int] = {}
        self._keep = distinct  # ids stay valid while the objects live
        offset = 0
        for pool in distinct:
            if (pool.mean, pool.std) != (distinct[0].mean, distinct[0].std):
                raise FedalignError("federations that are simulated together must normalise their data alike")
            self._offsets[id(pool)] = offset
            offset += len(pool.y)
        same = len(distinct) == 1
        self.x = (distinct[0].x if same else torch.cat([p.x for p in distinct])).to(device)
        self.y = (distinct[0].y if same else torch.cat([p.y for p in distinct])).to(device)
        if self.x.is_floating_point():
            self.x = self.x.to(dtype)
        if self.y.is_floating_point():
            self.y = self.y.to(dtype)
        self.has_classes = distinct[0].has_classes
        self.device, self.dtype = device, dtype
        mean, std = (torch.as_tensor(v, dtype=dtype, device=device) for v in (distinct[0].mean, distinct[0].std))
        trailing = (1,) * max(0, self.x.dim() - 2)
        self._mean, self._std = (t.reshape(-1, *trailing) if t.dim() else t for t in (mean, std))
        self._plain = not (mean.any() or (std != 1).any())

    @property
    def features(self) -> int:
        """How many numbers one sample's features are."""
        return int(self.x[0].numel())

    def rows(self, pool: Pool, rows: Rows) -> Rows:
        """Translate a pool's rows into rows of the joined data."""
        offset = self._offsets[id(pool)]
        return rows + offset if offset else rows

    def batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather features and labels for an index of any shape."""
        flat = rows.reshape(-1)
        x = self.x.index_select(0, flat)
        if x.dtype == torch.uint8:
            x = x.to(self.dtype).div_(255)
        if not self._plain:
            x = (x - self._mean) / self._std
        y = self.y.index_select(0, flat)
        return x.view(*rows.shape, *x.shape[1:]), y.view(*rows.shape, *y.shape[1:])


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of several jobs: ``rows[j, s, :counts[j, s]]`` are job j's samples in step s, at ``rates[j, s]``."""

    rows: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    rates: npt.NDArray[np.float64]


def batches_for(jobs: Sequence[TrainJob], data: Data) -> Batches:
    """Lay out the batches of jobs that share their local work. A job's batches don't depend on the other jobs."""
    local = jobs[0].local
    lengths = np.array([len(job.rows) for job in jobs], np.int64)
    steps = np.array([job.steps for job in jobs], np.int64)
    per_epoch = np.array([local.batches_per_epoch(n) for n in lengths.tolist()], np.int64)
    epochs = int(np.ceil(steps / per_epoch).max())
    longest = int(lengths.max())
    size = local.width_for(longest)
    width = int(per_epoch.max()) * size
    owned = np.zeros((len(jobs), width), np.int64)
    for j, job in enumerate(jobs):
        owned[j, : lengths[j]] = data.rows(job.pool, job.rows)

    if local.batch_size is None:
        order = np.broadcast_to(owned[:, None, :], (len(jobs), epochs, width))
    else:
        who = np.array([(job.seed, job.round, job.client) for job in jobs], np.int64)
        keys = hashed(who[:, 0:1], Purpose.BATCHES, who[:, 1:2], who[:, 2:3], np.arange(epochs)[None, :])
        shuffled = permutations(keys.reshape(-1), np.repeat(lengths, epochs)).reshape(len(jobs), epochs, longest)
        order = np.zeros((len(jobs), epochs, width), np.int64)
        # Behind a row's length a permutation is undefined; what lies there is cut off by the counts.
        np.minimum(shuffled, lengths[:, None, None] - 1, out=shuffled)
        order[:, :, :longest] = np.take_along_axis(owned[:, None, :], shuffled, axis=2)

    step = np.arange(int(steps.max()))[None, :]
    epoch, place = step // per_epoch[:, None], step % per_epoch[:, None]
    epoch = np.minimum(epoch, epochs - 1)
    table = order.reshape(len(jobs), epochs, -1, size)
    rows = table[np.arange(len(jobs))[:, None], epoch, place]
    counts = np.minimum(size, lengths[:, None] - place * size)
    counts[step >= steps[:, None]] = 0
    return Batches(rows, counts, _rates(jobs, steps))


def _rates(jobs: Sequence[TrainJob], steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    rates = np.zeros((len(jobs), int(steps.max())))
    for j, job in enumerate(jobs):
        if job.local.schedule.counts == "rounds":
            rates[j] = job.local.rate(job.round, job.rounds, 0, 1)
        else:
            n = int(steps[j])
            rates[j, :n] = [job.local.rate(job.round, job.rounds, s, n) for s in range(n)]
            if not (np.isfinite(rates[j, :n]).all() and rates[j, :n].min() > 0):
                raise FedalignError(f"lr is not positive in some local step of round {job.round}: {rates[j, :n].min()}")
    return rates
