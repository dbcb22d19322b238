"""Local Adam (Kingma and Ba, 2015, arXiv:1412.6980) and AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101)."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from fedalign.errors import FedalignError
from fedalign.training.optimizer import LocalOptimizer, Rate, State, descend, per_client


@dataclass(frozen=True)
class LocalAdam(LocalOptimizer):
    """Adam, as ``torch.optim.Adam`` has it, with bias correction; ``weight_decay·w`` is added to the gradient.

    Both moments start at zero every round.

    >>> LocalAdam(lr=0.001, epochs=2, beta2=0.99).steps_for(120)
    6
    """

    beta1: float = 0.9  #: how much of the mean of past gradients is kept in a step
    beta2: float = 0.999  #: how much of the mean of past squared gradients is kept in a step
    eps: float = 1e-8  #: added to the denominator

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < 1:
                raise FedalignError(f"{name} must be a number from 0 to below 1, not {value!r}")
        if isinstance(self.eps, bool) or not isinstance(self.eps, numbers.Real) or not 0 < float(self.eps) < 1:
            raise FedalignError(f"eps must be a small number above 0, not {self.eps!r}")

    def state(self, parameters: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """Make the step count and the means of gradients and of squared gradients; all are zero at first."""
        first = parameters[0]
        return {
            "steps": [torch.zeros(len(first), dtype=torch.float64, device=first.device)],
            "mean": [torch.zeros_like(p) for p in parameters],
            "square": [torch.zeros_like(p) for p in parameters],
        }

    def update(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], state: State, rate: Rate
    ) -> None:
        """Move by the mean gradient over the root of the mean square, both corrected for their start at zero."""
        # The corrections are computed in float64: 1 − β₂ᵗ of the first steps has few correct digits in float32.
        steps = state["steps"][0].add_(1)
        pace, root = rate / (1 - self.beta1**steps), (1 - self.beta2**steps).sqrt()
        for p, g, mean, square in zip(parameters, gradients, state["mean"], state["square"], strict=True):
            mean.lerp_(g, 1 - self.beta1)
            square.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            denominator = (square.sqrt() / per_client(root.to(p.dtype), p)).add_(self.eps)
            descend(p, mean / denominator, pace.to(p.dtype))

    def reference(self, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Make ``torch.optim.Adam`` with the same options, as the oracle."""
        return torch.optim.Adam(
            parameters, lr=1.0, betas=(self.beta1, self.beta2), eps=self.eps, weight_decay=self.weight_decay
        )


@dataclass(frozen=True)
class LocalAdamW(LocalAdam):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW`` has it: weights shrink by ``1 − η·weight_decay``.

    >>> LocalAdamW(lr=0.001, epochs=2).weight_decay
    0.01
    """

    weight_decay: float = field(default=0.01, kw_only=True)  #: as in PyTorch
    decoupled: ClassVar[bool] = True

    def reference(self, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Make ``torch.optim.AdamW`` with the same options, as the oracle."""
        return torch.optim.AdamW(
            parameters, lr=1.0, betas=(self.beta1, self.beta2), eps=self.eps, weight_decay=self.weight_decay
        )
