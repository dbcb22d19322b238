"""The local steps of a chunk: clients that are trained together, the one with most steps first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedalign.simulation.engine.batches import batches_for
from fedalign.simulation.engine.draws import draw_keys
from fedalign.simulation.engine.jobs import Data, TrainJob
from fedalign.training.optimizer import Rate


@dataclass(frozen=True, eq=False)
class Step:
    """One local step of the clients that still have one: padded features and labels, and each sample's weight.

    ``weights`` is None where no batch is padded: then every sample weighs ``1/width``.
    """

    x: torch.Tensor
    y: torch.Tensor
    width: int
    first: int  # how many of the first client's samples are real
    weights: torch.Tensor | None
    rate: Rate
    keys: torch.Tensor | None  # each client's key for the model's random draws, if it has any


def steps(jobs: Sequence[TrainJob], data: Data, *, draws: bool = False) -> Iterator[Step]:
    """Yield the steps of jobs of one width, sorted by descending number of steps: a step has a prefix of them.

    ``draws``: the model draws random numbers, so the steps have keys. A step's features are overwritten by the next's.
    """
    batches = batches_for(jobs, data)
    rows = batches.rows
    keys = draw_keys(jobs, data.device) if draws else None
    equal_rates = bool((batches.rates == batches.rates[:1]).all())
    rates = None if equal_rates else torch.from_numpy(batches.rates).to(data.device, data.dtype)
    active = (batches.counts > 0).sum(0)
    width = batches.rows.shape[2]
    room = data.buffer(len(jobs) * width)
    for s, n in enumerate(active.tolist()):
        counts = batches.counts[:n, s]
        weights = None
        if int(counts.min()) < width:
            real = np.arange(width)[None, :] < counts[:, None]
            weights = torch.from_numpy(real / counts[:, None]).to(data.device, data.dtype)
        x, y = data.batch(rows[:n, s], room)
        rate = float(batches.rates[0, s]) if rates is None else rates[:n, s]
        yield Step(x, y, width, int(counts[0]), weights, rate, None if keys is None else keys[:n, s])
