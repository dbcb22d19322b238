"""One SGD step for many clients at once: every tensor has the clients as its first dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedalign.simulation.engine.jobs import TrainJob
from fedalign.training.local import LocalSGD

Rate = float | torch.Tensor  # one for all clients, or one per client


class StackedSGD:
    """Momentum, weight decay, clipping, proximal term and corrections of :class:`LocalSGD`; ``plain``: none of them.

    Clients that have finished are the last ones, so a step touches a prefix of the stack.
    """

    def __init__(self, local: LocalSGD, parameters: Sequence[torch.Tensor]) -> None:
        self._local = local
        self._parameters = parameters
        self.plain = not (local.mu or local.momentum or local.weight_decay or local.clip or local.scaffold)
        self._corrections = [torch.zeros_like(p) for p in parameters] if local.scaffold else []
        self._start = [p.clone() for p in parameters] if local.mu else []
        self._velocity = [torch.zeros_like(p) for p in parameters] if local.momentum else []

    def correct(self, jobs: Sequence[TrainJob]) -> None:
        """Take over the jobs' corrections (SCAFFOLD)."""
        if not self._corrections:
            return
        given = [job.correction for job in jobs]
        if any(one is None for one in given):
            raise ValueError("a job of SCAFFOLD lacks its correction")
        flat = torch.stack(given)  # type: ignore[arg-type]
        sizes = [c[0].numel() for c in self._corrections]
        for mine, piece in zip(self._corrections, torch.split(flat, sizes, dim=1), strict=True):
            mine[: len(jobs)].copy_(piece.view(len(jobs), *mine.shape[1:]))
            mine[len(jobs) :].zero_()

    def reset(self) -> None:
        """Begin a round: remember where the parameters are now, and come to rest."""
        for start, p in zip(self._start, self._parameters, strict=False):
            start.copy_(p)
        for velocity in self._velocity:
            velocity.zero_()

    def step(self, gradients: Sequence[torch.Tensor], rate: Rate) -> None:
        """Move the first ``len(gradients[0])`` clients; the gradients are used up."""
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
                g.mul_(shrink.view(-1, *(1,) * (g.dim() - 1)))
        if local.weight_decay:
            for g, p in zip(gradients, parameters, strict=True):
                g.add_(p, alpha=local.weight_decay)
        if local.momentum:
            gradients = [
                v[:active].mul_(local.momentum).add_(g) for v, g in zip(self._velocity, gradients, strict=True)
            ]
        for p, g in zip(parameters, gradients, strict=True):
            if isinstance(rate, float):
                p.sub_(g, alpha=rate)
            else:
                p.addcmul_(g, rate.view(-1, *(1,) * (g.dim() - 1)), value=-1)
