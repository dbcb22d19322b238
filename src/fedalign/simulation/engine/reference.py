"""The reference engine: one client after another, one batch after another, with plain PyTorch.

It defines what local work means, and the batched engine is tested against it. It is simple on purpose: don't make it
fast.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from fedalign.protocol.calibration import TEMPERATURES
from fedalign.rules.rule import Measure
from fedalign.simulation.engine.batches import batches_for
from fedalign.simulation.engine.batchnorm import spare
from fedalign.simulation.engine.draws import draw_keys
from fedalign.simulation.engine.jobs import Data, EvalJob, Trained, TrainJob
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.engine.pairs import PairComparer
from fedalign.simulation.engine.random_functions import hashed_draws, tried
from fedalign.training.losses import PerSampleLoss, hits, quick_tempered_losses, takes_logits, tempered_losses


class ReferenceEngine:
    """Evaluates and trains each client by itself, with a PyTorch module and a PyTorch optimiser."""

    def __init__(self, template: nn.Module, loss: PerSampleLoss, data: Data, *, accuracy: bool = True) -> None:
        self._accuracy = accuracy
        self.device = data.device
        self.layout = Layout(template)
        self._module = spare(copy.deepcopy(template).to(data.device))
        self._loss = loss
        self._data = data
        self._draws = tried(template, data).draws.count > 0
        self.pairs = PairComparer(template, self.layout, data, classes=accuracy)

    def evaluate(self, jobs: Sequence[EvalJob]) -> list[Measure]:
        """Measure each job's loss and accuracy in evaluation mode."""
        measures = []
        for job in jobs:
            self.layout.load(self._module, job.model)
            self._module.eval()
            x, y = self._data.batch(torch.as_tensor(self._data.rows(job.pool, job.rows), device=self.device))
            with torch.no_grad():
                outputs = self._module(x)
                loss = self._loss(outputs, y).double().mean().item()
            accuracy = hits(outputs, y).mean().item() if self._accuracy else None
            tempered: tuple[float, ...] = ()
            if job.tempered and takes_logits(self._loss):
                losses = quick_tempered_losses if job.quick else tempered_losses
                tempered = tuple(losses(self._loss, outputs, y, TEMPERATURES).mean(0).tolist())
            measures.append(Measure(loss, accuracy, len(y), tempered))
        return measures

    def train(self, jobs: Sequence[TrainJob]) -> Iterator[Trained]:
        """Train each job's client; the results come in the jobs' order."""
        for j, job in enumerate(jobs):
            model = self._train_one(job)
            yield Trained(j, model, torch.isfinite(model).all())

    def _train_one(self, job: TrainJob) -> torch.Tensor:
        local, module = job.local, self._module
        self.layout.load(module, job.model)
        module.train()
        trainable = [p for p in module.parameters() if p.requires_grad]
        chosen = range(len(trainable)) if job.only is None else job.only
        parameters = [trainable[place] for place in chosen]
        centre = self._pieces(job.model if job.towards is None else job.towards, trainable)
        start = [centre[place] for place in chosen]
        batches = batches_for([job], self._data)
        keys = draw_keys([job], self.device)[0] if self._draws else None
        optimizer = local.reference(parameters)
        for step in range(job.steps):
            x, y = self._data.batch(batches.rows[0, step, : batches.counts[0, step]])
            optimizer.param_groups[0]["lr"] = float(batches.rates[0, step])
            module.zero_grad()
            with hashed_draws(keys[step] if keys is not None else None):
                outputs = module(x)
            objective = self._loss(outputs, y).mean()
            if local.mu:
                distance = sum((p - p0).square().sum() for p, p0 in zip(parameters, start, strict=True))
                objective = objective + local.mu / 2 * distance
            objective.backward()  # type: ignore[no-untyped-call]
            if job.correction is not None:
                for p, piece in zip(trainable, self._pieces(job.correction, trainable), strict=True):
                    if p.grad is not None:
                        p.grad += piece
            if local.clip is not None:
                nn.utils.clip_grad_norm_(parameters, local.clip)
            optimizer.step()
        return self.layout.flatten(module)

    def _pieces(self, flat: torch.Tensor, trainable: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Cut the trainable part of a flat vector into the shapes of the parameters."""
        cut = torch.split(flat[: self.layout.trainable_size], [p.numel() for p in trainable])
        return [piece.view_as(p) for piece, p in zip(cut, trainable, strict=True)]
