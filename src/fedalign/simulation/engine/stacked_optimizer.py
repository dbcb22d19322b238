"""One optimiser step for many clients at once: every tensor has the clients as its first dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedalign.simulation.engine.jobs import TrainJob
from fedalign.training.optimizer import LocalOptimizer, Rate, decay, per_client


class StackedOptimizer:
    """The steps of a :class:`LocalOptimizer` on a stack: SCAFFOLD's correction, proximal term, clipping, decay, update.

    Clients that have finished are the last ones, so a step touches a prefix of the stack. ``only`` has the places of
    the parameters that are trained, where not all are.
    """

    def __init__(
        self, local: LocalOptimizer, parameters: Sequence[torch.Tensor], only: tuple[int, ...] | None = None
    ) -> None:
        self._local = local
        self._sizes = [p[0].numel() for p in parameters]
        self._places = range(len(parameters)) if only is None else only
        parameters = [parameters[place] for place in self._places]
        self._parameters = parameters
        self.plain = local.is_plain and only is None
        self._corrections = [torch.zeros_like(p) for p in parameters] if local.scaffold else []
        self._start = [p.clone() for p in parameters] if local.mu else []
        self._state = {} if self.plain else local.state(parameters)

    def prepare(self, jobs: Sequence[TrainJob]) -> None:
        """Copy the jobs' corrections (SCAFFOLD), and the models that the proximal term pulls towards."""
        if self._corrections:
            given = [job.correction for job in jobs]
            if any(one is None for one in given):
                raise ValueError("a job of SCAFFOLD lacks its correction")
            self._copy(self._corrections, torch.stack(given))  # type: ignore[arg-type]
            for correction in self._corrections:
                correction[len(jobs) :].zero_()
        if self._start and any(job.towards is not None for job in jobs):
            self._copy(self._start, torch.stack([job.model if job.towards is None else job.towards for job in jobs]))

    def _copy(self, held: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Copy the trained part of stacked flat vectors into the first rows of stacked tensors."""
        pieces = torch.split(flat[:, : sum(self._sizes)], self._sizes, dim=1)
        for tensor, place in zip(held, self._places, strict=True):
            tensor[: len(flat)].copy_(pieces[place].view(len(flat), *tensor.shape[1:]))

    def reset(self) -> None:
        """Begin a round in the same memory: the parameters as they are now are the start, and the state is new."""
        for start, p in zip(self._start, self._parameters, strict=False):
            start.copy_(p)
        if self._state:
            for name, tensors in self._local.state(self._parameters).items():
                for held, new in zip(self._state[name], tensors, strict=True):
                    held.copy_(new)

    def step(self, gradients: Sequence[torch.Tensor], rate: Rate) -> None:
        """Move the first ``len(gradients[0])`` clients by the gradients of all parameters, which are overwritten."""
        gradients = [gradients[place] for place in self._places]
        local, active = self._local, len(gradients[0])
        parameters = [p[:active] for p in self._parameters]
        for g, correction in zip(gradients, self._corrections, strict=False):
            g.add_(correction[:active])
        if local.mu:
            for g, p, start in zip(gradients, parameters, self._start, strict=True):
                g.add_(p - start[:active], alpha=local.mu)
        if local.clip is not None:
            norm = torch.stack([g.reshape(active, -1).square().sum(1) for g in gradients]).sum(0).sqrt()
            shrink = (local.clip / (norm + 1e-6)).clamp(max=1.0)
            for g in gradients:
                g.mul_(per_client(shrink, g))
        if local.weight_decay:
            for g, p in zip(gradients, parameters, strict=True):
                if local.decoupled:
                    decay(p, local.weight_decay, rate)
                else:
                    g.add_(p, alpha=local.weight_decay)
        state = {name: [t[:active] for t in tensors] for name, tensors in self._state.items()}
        local.update(parameters, gradients, state, rate)
