"""Compares two models sample by sample, for both engines: which of them classifies a sample correctly."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from fedalign.data.federation import Rows
from fedalign.data.samples import Pool
from fedalign.protocol.messages import Outcomes
from fedalign.simulation.engine.jobs import Data
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.engine.outputs import samples_at_once
from fedalign.training.losses import hits


@dataclass(frozen=True, eq=False)
class PairJob:
    """Compare two models (flat vectors) on rows of a pool, client by client."""

    models: tuple[torch.Tensor, torch.Tensor]
    pool: Pool
    rows: Mapping[int, Rows]


class PairComparer:
    """Classifies samples with pairs of models, in evaluation mode and with plain PyTorch.

    A round has one pair for a run, so models are not stacked. Counts stay on the device until all are there: on a GPU,
    every reading waits for the work.
    """

    def __init__(self, template: nn.Module, layout: Layout, data: Data, *, classes: bool) -> None:
        self._module = copy.deepcopy(template).to(data.device).eval()
        self._layout, self._data, self._classes = layout, data, classes
        self._at_once = samples_at_once(data)

    def compare(self, jobs: Sequence[PairJob]) -> list[dict[int, Outcomes]]:
        """Return the outcomes of every job by client; clients without rows are missing, and all without classes."""
        found: list[dict[int, Outcomes]] = [{} for _ in jobs]
        places = [(j, k) for j, job in enumerate(jobs) for k, rows in job.rows.items() if len(rows)]
        if not self._classes or not places:
            return found
        with torch.no_grad():
            counts = torch.cat([self._counts(job) for job in jobs if any(map(len, job.rows.values()))]).tolist()
        for (j, k), (gained, lost) in zip(places, counts, strict=True):
            found[j][k] = Outcomes(gained, lost, len(jobs[j].rows[k]))
        return found

    def _counts(self, job: PairJob) -> torch.Tensor:
        """Count the gained and the lost samples of every client of a job that has rows."""
        device = self._data.device
        parts = [self._data.rows(job.pool, rows) for rows in job.rows.values() if len(rows)]
        lengths = torch.tensor([len(rows) for rows in parts], device=device)
        rows = torch.from_numpy(np.concatenate(parts)).to(device)
        first, second = (self._right(model, rows) for model in job.models)
        ahead = first - second
        return torch.stack(
            [torch.segment_reduce(part.clamp(min=0), "sum", lengths=lengths) for part in (ahead, -ahead)], dim=1
        )

    def _right(self, model: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        weights = self._layout.unflatten(model)
        found = []
        for part in torch.split(rows, self._at_once):
            x, y = self._data.batch(part)
            found.append(hits(functional_call(self._module, weights, (x,)), y))
        return torch.cat(found)
