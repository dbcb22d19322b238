"""The order in which a client's samples come. Both engines read it here, so they see the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedalign.errors import FedalignError
from fedalign.randomness import U64, Purpose, hashed, permutations, permutations_on
from fedalign.simulation.jobs import Data, TrainJob


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of several jobs: ``rows[j, s, :counts[j, s]]`` are job j's samples in step s, at ``rates[j, s]``."""

    rows: torch.Tensor  # on the data's device
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
    owned_rows = np.zeros((len(jobs), width), np.int64)
    for j, job in enumerate(jobs):
        owned_rows[j, : lengths[j]] = data.rows(job.pool, job.rows)
    owned = torch.from_numpy(owned_rows).to(data.device)

    if local.batch_size is None:
        order = owned[:, None, :].expand(-1, epochs, -1)
    else:
        who = np.array([(job.seed, job.round, job.client) for job in jobs], np.int64)
        keys = hashed(who[:, 0:1], Purpose.BATCHES, who[:, 1:2], who[:, 2:3], np.arange(epochs)[None, :])
        shuffled = _shuffled(keys.reshape(-1), np.repeat(lengths, epochs), data.device)
        # Behind a row's length a permutation is undefined; what lies there is cut off by the counts.
        shuffled = shuffled.view(len(jobs), -1).clamp_(max=width - 1)
        order = torch.zeros((len(jobs), epochs, width), dtype=torch.int64, device=data.device)
        order[:, :, :longest] = owned.gather(1, shuffled).view(len(jobs), epochs, longest)

    step = np.arange(int(steps.max()))[None, :]
    epoch, place = step // per_epoch[:, None], step % per_epoch[:, None]
    table = order.reshape(len(jobs), epochs, -1, size)
    if (per_epoch == per_epoch[0]).all() and (steps == steps[0]).all():
        rows = table.reshape(len(jobs), -1, size)[:, : int(steps[0])]
    else:
        where = torch.from_numpy(np.stack([np.minimum(epoch, epochs - 1), place])).to(data.device)
        rows = table[torch.arange(len(jobs), device=data.device)[:, None], where[0], where[1]]
    counts = np.minimum(size, lengths[:, None] - place * size)
    counts[step >= steps[:, None]] = 0
    return Batches(rows, counts, _rates(jobs, steps))


def _shuffled(keys: U64, lengths: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.from_numpy(permutations(keys, lengths))
    return permutations_on(device, keys, lengths)


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
