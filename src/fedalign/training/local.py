"""Local SGD: plain, with momentum, proximal or with control variates.

``mu`` adds the term ``μ/2·‖w_k − w‖²`` of FedProx (Li et al., 2020, arXiv:1812.06127) to the local objective.
``scaffold`` corrects every step by control variates (Karimireddy et al., 2020, arXiv:1910.06378, option II): ``c −
c_k`` is added to the gradient; afterwards ``c_k ← c_k − c + (w − w_k)/Ση``, and the server adds ``a·Σ share_k·Δc_k`` to
``c``, with the aggregate's shares and ``a`` the part of the priority clients' weight that took part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fedalign.errors import FedalignError
from fedalign.training.optimizer import LocalOptimizer, Rate, State, descend


@dataclass(frozen=True)
class LocalSGD(LocalOptimizer):
    """Stochastic gradient descent, as ``torch.optim.SGD`` has it.

    Every step computes ``g = ∇loss + mu·(w_k − w)``, clips it to norm ``clip``, adds ``weight_decay·w_k``, and moves
    with heavy-ball momentum. Momentum starts at zero every round.

    >>> LocalSGD(lr=0.1, epochs=5, batch_size=50).steps_for(120)
    15
    >>> LocalSGD(lr=0.1, steps=4).steps_for(120)
    4
    """

    momentum: float = 0.0  #: how much of the last step's direction is kept
    scaffold: bool = field(default=False, kw_only=True)  #: SCAFFOLD's control variates

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_not_negative("momentum")
        if self.scaffold and (self.momentum or self.mu or self.clip is not None):
            raise FedalignError("scaffold corrects plain SGD steps: leave momentum, mu and clip out")

    @property
    def is_plain(self) -> bool:
        """Whether a step is ``w ← w − η·∇loss`` and nothing else."""
        return not (self.mu or self.momentum or self.weight_decay or self.clip or self.scaffold)

    def state(self, parameters: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """Make the velocities, which are zero at first; none without momentum."""
        return {"velocity": [torch.zeros_like(p) for p in parameters]} if self.momentum else {}

    def update(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], state: State, rate: Rate
    ) -> None:
        """Move against the gradient, or along the velocity."""
        if self.momentum:
            gradients = [v.mul_(self.momentum).add_(g) for v, g in zip(state["velocity"], gradients, strict=True)]
        for p, g in zip(parameters, gradients, strict=True):
            descend(p, g, rate)

    def reference(self, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Make ``torch.optim.SGD`` with the same options, as the oracle."""
        return torch.optim.SGD(parameters, lr=1.0, momentum=self.momentum, weight_decay=self.weight_decay)
