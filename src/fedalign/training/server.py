"""Server optimisers: how the server moves the model towards the aggregate of a round. FedAvg takes the aggregate.

The difference ``Δ = mean − w`` is treated as a gradient (Reddi et al., "Adaptive Federated Optimization", 2021,
arXiv:2003.00295). FedAvgM is from Hsu, Qi and Brown (2019, arXiv:1909.06335). As in the protocol, a model is any object
with arithmetic.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedalign.errors import FedalignError

Model = Any


class ServerOptimizer(abc.ABC):
    """A server optimiser. ``memory`` holds its state between rounds, and is empty before the first step."""

    @abc.abstractmethod
    def step(self, model: Model, mean: Model, memory: Sequence[Model]) -> tuple[Model, tuple[Model, ...]]:
        """Return the new model and the new memory; ``mean`` is the aggregate of the round."""


@dataclass(frozen=True)
class Branch:
    """A model together with the state that the server optimiser keeps for it."""

    model: Model
    memory: tuple[Model, ...] = ()

    def step(self, mean: Model, server: ServerOptimizer | None) -> Branch:
        """Return the branch after a round: at the aggregate ``mean``, or one step of the optimiser towards it."""
        return Branch(mean) if server is None else Branch(*server.step(self.model, mean, self.memory))


def _check(**values: float) -> None:
    for name, value in values.items():
        if name.startswith("beta") or name == "momentum":
            if not 0 <= value < 1:
                raise FedalignError(f"server.{name} must be in [0, 1), not {value}")
        elif not 0 < value < math.inf:
            raise FedalignError(f"server.{name} must be positive, not {value}")


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """Server momentum: ``m ← β m + Δ``, ``w ← w + lr·m``. With β = 0 and lr = 1 it is FedAvg.

    >>> FedAvgM(momentum=0.5).step(0.0, 1.0, (2.0,))
    (2.0, (2.0,))
    """

    lr: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check(lr=self.lr, momentum=self.momentum)

    def step(self, model: Model, mean: Model, memory: Sequence[Model]) -> tuple[Model, tuple[Model, ...]]:
        """Add Δ to the momentum and move along it."""
        speed = mean - model
        if memory:
            speed = memory[0] * self.momentum + speed
        return model + speed * self.lr, (speed,)


@dataclass(frozen=True)
class FedAdam(ServerOptimizer):
    """``m ← β₁m + (1−β₁)Δ``, ``v ← β₂v + (1−β₂)Δ²``, ``w ← w + lr·m/(√v + τ)``; v starts at τ², as in the paper.

    With β₁ = β₂ = 0 and τ = lr far above every |Δ| it is FedAvg.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check(lr=self.lr, beta1=self.beta1, beta2=self.beta2, tau=self.tau)

    def step(self, model: Model, mean: Model, memory: Sequence[Model]) -> tuple[Model, tuple[Model, ...]]:
        """Update both moments with Δ and move along their ratio."""
        difference = mean - model
        square = difference * difference
        m, v = memory or (difference * 0.0, square * 0.0 + self.tau**2)
        m = m * self.beta1 + difference * (1 - self.beta1)
        v = self._second(v, square)
        return model + m / (v**0.5 + self.tau) * self.lr, (m, v)

    def _second(self, v: Model, square: Model) -> Model:
        return v * self.beta2 + square * (1 - self.beta2)


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAdam with ``v ← v − (1−β₂)Δ²·sign(v − Δ²)``, so that the change of v depends on Δ² and not on v."""

    def _second(self, v: Model, square: Model) -> Model:
        sign = (v > square) * 1.0 - (v < square) * 1.0
        return v - square * sign * (1 - self.beta2)


@dataclass(frozen=True)
class Partial(ServerOptimizer):
    """Steps the first ``size`` numbers of a flat model; BatchNorm statistics, the rest, are averaged."""

    optimizer: ServerOptimizer
    size: int

    def step(self, model: Model, mean: Model, memory: Sequence[Model]) -> tuple[Model, tuple[Model, ...]]:
        """Step the trainable part; the memory is padded to the length of the model, to be stored beside it."""
        short = [one[: self.size] for one in memory]
        moved, kept = self.optimizer.step(model[: self.size], mean[: self.size], short)
        new = mean * 1.0
        new[: self.size] = moved
        padded = []
        for one in kept:
            whole = mean * 0.0
            whole[: self.size] = one
            padded.append(whole)
        return new, tuple(padded)
