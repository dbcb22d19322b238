"""Server optimisers: how the server moves the model towards the aggregate of a round. FedAvg takes the aggregate.

The difference ``Δ = mean − w`` is treated as a gradient (Reddi et al., "Adaptive Federated Optimization", 2021,
arXiv:2003.00295). FedAvgM is from Hsu, Qi and Brown (2019, arXiv:1909.06335). As in the protocol, a model is any object
with arithmetic.
"""

from __future__ import annotations

import abc
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedalign.errors import FedalignError

Model = Any
Memory = Mapping[str, Model]


class ServerOptimizer(abc.ABC):
    """A server's step. Subclass it and define :meth:`step`.

    ``memory`` is what the optimiser keeps from round to round, by name. It is empty before the first step.
    """

    @abc.abstractmethod
    def step(self, model: Model, mean: Model, memory: Memory) -> tuple[Model, Memory]:
        """Return the new model and the new memory, given the round's model and the clients' aggregate."""


@dataclass(frozen=True)
class ServerModel:
    """A model on the server, and what the server optimiser remembers for it.

    >>> model = ServerModel(0.0).step(1.0, FedAvgM(momentum=0.5))
    >>> model.named("model")
    {'model': 1.0, 'model.momentum': 1.0}
    >>> ServerModel.restore("model", model.named("model")) == model
    True
    """

    weights: Model
    memory: Memory = field(default_factory=dict)

    def step(self, mean: Model, server: ServerOptimizer | None) -> ServerModel:
        """Move to a round's aggregate (FedAvg, without a ``server`` optimiser), or towards it."""
        return ServerModel(mean) if server is None else ServerModel(*_step(server, self.weights, mean, self.memory))

    def named(self, name: str) -> dict[str, Model]:
        """Return the weights and the memory by name, for a snapshot."""
        return {name: self.weights, **{f"{name}.{part}": tensor for part, tensor in self.memory.items()}}

    @classmethod
    def restore(cls, name: str, tensors: Mapping[str, Model]) -> ServerModel:
        """Read back what :meth:`named` returned."""
        memory = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
        return cls(tensors[name], memory)


def _step(server: ServerOptimizer, model: Model, mean: Model, memory: Memory) -> tuple[Model, Memory]:
    """Take an optimiser's step. One that was written for version 0.1 keeps a tuple, whose places become names."""
    old = bool(memory) and all(name.isdigit() for name in memory)
    places = tuple(memory[name] for name in sorted(memory, key=int)) if old else ()
    new, kept = server.step(model, mean, places if old else memory)  # type: ignore[arg-type]
    if isinstance(kept, tuple | list):
        name = type(server).__name__
        warnings.warn(
            f"{name}.step keeps a tuple; return a dictionary by name instead", DeprecationWarning, stacklevel=2
        )
        kept = {str(place): tensor for place, tensor in enumerate(kept)}
    return new, kept


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

    >>> FedAvgM(momentum=0.5).step(0.0, 1.0, {"momentum": 2.0})
    (2.0, {'momentum': 2.0})
    """

    lr: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check(lr=self.lr, momentum=self.momentum)

    def step(self, model: Model, mean: Model, memory: Memory) -> tuple[Model, Memory]:
        """Add the difference to the momentum, and move by that."""
        speed = mean - model
        if memory:
            speed = memory["momentum"] * self.momentum + speed
        return model + speed * self.lr, {"momentum": speed}


@dataclass(frozen=True)
class FedAdam(ServerOptimizer):
    """``m ← β₁m + (1−β₁)Δ``, ``v ← β₂v + (1−β₂)Δ²``, ``w ← w + lr·m/(√v + τ)``; v starts at τ², as in the paper.

    With β₁ = β₂ = 0 and τ = lr far above every ``|Δ|`` it is FedAvg.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check(lr=self.lr, beta1=self.beta1, beta2=self.beta2, tau=self.tau)

    def step(self, model: Model, mean: Model, memory: Memory) -> tuple[Model, Memory]:
        """Update both moments of the difference, and move by their quotient."""
        difference = mean - model
        square = difference * difference
        m = memory["first_moment"] if memory else difference * 0.0
        v = memory["second_moment"] if memory else square * 0.0 + self.tau**2
        m = m * self.beta1 + difference * (1 - self.beta1)
        v = self._second(v, square)
        return model + m / (v**0.5 + self.tau) * self.lr, {"first_moment": m, "second_moment": v}

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

    def step(self, model: Model, mean: Model, memory: Memory) -> tuple[Model, Memory]:
        """Step the trainable numbers and take the aggregate of the others."""
        moved, kept = _step(self.optimizer, model[: self.size], mean[: self.size], memory)
        new = mean * 1.0
        new[: self.size] = moved
        return new, kept


def fedavg() -> None:
    """Make no optimiser: the server takes the round's mean as the new model."""
