"""The engines' interface: jobs to evaluate and to train, results, and the data on the engine's device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from fedalign.data.federation import Rows
from fedalign.data.samples import Pool
from fedalign.errors import FedalignError
from fedalign.rules.rule import Measure
from fedalign.simulation.engine.layout import Layout
from fedalign.training.optimizer import LocalOptimizer

if TYPE_CHECKING:
    from fedalign.simulation.engine.pairs import PairComparer


@dataclass(frozen=True, eq=False)
class EvalJob:
    """Measure a model (a flat vector) on rows of a pool; with ``tempered``, the loss at several temperatures, too."""

    model: torch.Tensor
    pool: Pool
    rows: Rows
    tempered: bool = False
    quick: bool = False  #: the losses at several temperatures need not be those of the loss function to the last bit


@dataclass(frozen=True, eq=False)
class TrainJob:
    """Train a model on a client's rows; ``seed``, ``round`` and ``client`` fix the order of its batches."""

    model: torch.Tensor
    pool: Pool
    rows: Rows
    local: LocalOptimizer
    seed: int
    round: int
    rounds: int
    client: int
    correction: torch.Tensor | None = None  # SCAFFOLD's c − c_k, of the trainable part's length
    towards: torch.Tensor | None = None  # the model that the local work's mu pulls towards; None: the one above
    only: tuple[int, ...] | None = None  # the places of the trainable tensors that are trained; None: all

    @property
    def steps(self) -> int:
        """Count this job's local steps."""
        return self.local.steps_for(len(self.rows))

    @property
    def width(self) -> int:
        """Give the width that this job's batches are padded to when it is stacked."""
        return self.local.width_for(len(self.rows))


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished job's number, its model, and whether that is finite (a tensor: reading it synchronises with a GPU)."""

    job: int
    model: torch.Tensor
    finite: torch.Tensor


class Engine(Protocol):
    """Evaluates and trains models; the two implementations agree up to rounding."""

    device: torch.device
    layout: Layout
    pairs: PairComparer  #: compares two models sample by sample

    def evaluate(self, jobs: Sequence[EvalJob]) -> list[Measure]:
        """Measure losses and accuracies, one result per job."""
        ...

    def train(self, jobs: Sequence[TrainJob]) -> Iterator[Trained]:
        """Train, and yield results as they finish. The order among one run's jobs doesn't depend on the other jobs."""
        ...


class Data:
    """The samples of all runs, stored once on the engine's device; batches are gathered and normalised on demand."""

    def __init__(self, pools: Sequence[Pool], device: torch.device, dtype: torch.dtype) -> None:
        distinct = list({id(pool): pool for pool in pools}.values())
        self._offsets: dict[int, int] = {}
        self._keep = distinct  # keeps the ids valid
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
        """Count the numbers in one sample's features."""
        return int(self.x[0].numel())

    def rows(self, pool: Pool, rows: Rows) -> Rows:
        """Translate a pool's rows into rows of the joined data."""
        offset = self._offsets[id(pool)]
        return rows + offset if offset else rows

    def batch(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather features and labels for an index of any shape; features go to ``out`` where that is given."""
        flat = rows.reshape(-1)
        room = None if out is None else out[: len(flat)]
        if self.x.dtype == torch.uint8:
            raw = self.x.index_select(0, flat)
            if room is not None:
                x = room.copy_(raw).div_(255)
            elif self.dtype == torch.get_default_dtype():
                x = raw / 255  # in one pass over the batch
            else:
                x = raw.to(self.dtype).div_(255)
        else:
            x = self.x.index_select(0, flat) if room is None else torch.index_select(self.x, 0, flat, out=room)
        if not self._plain:
            x = (x - self._mean) / self._std
        y = self.y.index_select(0, flat)
        return x.view(*rows.shape, *x.shape[1:]), y.view(*rows.shape, *y.shape[1:])

    def buffer(self, samples: int) -> torch.Tensor:
        """Allocate the features of so many samples: new memory for every batch costs more than filling it."""
        dtype = self.dtype if self.x.dtype == torch.uint8 else self.x.dtype
        return torch.empty((samples, *self.x.shape[1:]), dtype=dtype, device=self.device)
