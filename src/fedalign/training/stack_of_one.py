"""A stacked update rule as a PyTorch optimiser of one client, for optimisers that PyTorch doesn't have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedalign.training.optimizer import LocalOptimizer, decay


class StackOfOne(torch.optim.Optimizer):
    """Applies a :class:`LocalOptimizer`'s rule to one client: its parameters are a stack of height one.

    >>> from fedalign.training.local import LocalSGD
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = StackOfOne(LocalSGD(lr=0.5, epochs=1), [w])
    >>> w.square().sum().backward()
    >>> optimizer.step()
    >>> w.tolist()
    [0.0, 0.0]
    """

    def __init__(self, local: LocalOptimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
        rate = local.schedule.at(0, 1)
        super().__init__(list(parameters), {"lr": rate})
        self._local = local
        self._stack = [p.detach().unsqueeze(0) for p in parameters]
        self._memory = local.state(self._stack)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do one step at the rate of ``param_groups[0]["lr"]``; parameters without a gradient have gradient zero."""
        (group,) = self.param_groups
        rate, local = float(group["lr"]), self._local
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in group["params"]]
        stacked = [g.unsqueeze(0) for g in gradients]
        if local.weight_decay:
            for g, p in zip(stacked, self._stack, strict=True):
                if local.decoupled:
                    decay(p, local.weight_decay, rate)
                else:
                    g.add_(p, alpha=local.weight_decay)
        local.update(self._stack, stacked, self._memory, rate)
