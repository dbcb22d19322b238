"""Strongly convex federations for the experiments on theory: all seeds share the data and differ in their batches.

The optima of the priority clients are at distance ``spread`` from a centre. The optimum of free client j of M is at
distance ``shift·(j + ½)/M`` from it, in a random direction: from well aligned to badly aligned.
"""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedalign.data.federation import Federation
from fedalign.errors import FedalignError

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Convex(abc.ABC):
    """Settings that both kinds share: the number of clients, and how far apart their optima are."""

    priority: int = 4
    free: int = 8
    dimensions: int = 5
    samples: int = 40
    spread: float = 0.5
    shift: float = 2.0
    data_seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("priority", 1), ("free", 0), ("dimensions", 1), ("samples", 2)):
            if getattr(self, name) < least:
                raise FedalignError(f"data.{name} must be at least {least}, not {getattr(self, name)}")

    def federation(self, seed: int) -> Federation:
        """Return the federation, which is the same for every ``seed``."""
        return _made(self)

    @abc.abstractmethod
    def clients(self, draw: np.random.Generator) -> list[tuple[Array, npt.NDArray[np.generic]]]:
        """Draw the samples of every client, priority clients first."""

    def optima(self, draw: np.random.Generator, size: int, scale: float = 1.0) -> list[Array]:
        """Draw the optimum of every client: a vector of ``size`` numbers; ``scale`` multiplies the centre."""
        centre = scale * draw.normal(size=size)
        away = [self.spread] * self.priority + [self.shift * (j + 0.5) / self.free for j in range(self.free)]
        directions = draw.normal(size=(len(away), size))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        return [centre + far * direction for far, direction in zip(away, directions, strict=True)]


@dataclass(frozen=True)
class Quadratic(Convex):
    """Least squares of known curvature: the Hessian of every client's mean (x·w − y)² has eigenvalues mu to L."""

    mu: float = 0.5
    L: float = 2.0
    noise: float = 0.5  #: standard deviation of y around x·w

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mu <= self.L:
            raise FedalignError(f"data.mu and data.L must be positive, mu at most L, not {self.mu} and {self.L}")
        if self.samples < self.dimensions:
            raise FedalignError(f"data.samples must be at least data.dimensions, {self.dimensions}, not {self.samples}")

    def clients(self, draw: np.random.Generator) -> list[tuple[Array, npt.NDArray[np.generic]]]:
        """Draw samples whose singular values give the Hessian these eigenvalues."""
        root = np.sqrt(np.linspace(self.mu, self.L, self.dimensions) * self.samples / 2)
        drawn: list[tuple[Array, npt.NDArray[np.generic]]] = []
        for w in self.optima(draw, self.dimensions):
            left = np.linalg.qr(draw.normal(size=(self.samples, self.dimensions)))[0]
            right = np.linalg.qr(draw.normal(size=(self.dimensions, self.dimensions)))[0]
            x = left * root @ right
            drawn.append((x, (x @ w + self.noise * draw.normal(size=self.samples))[:, None]))
        return drawn


@dataclass(frozen=True)
class Multinomial(Convex):
    """Multinomial logistic regression: labels are drawn from softmax(W·x), with x on the unit sphere."""

    dimensions: int = 6
    samples: int = 60
    spread: float = 1.0
    shift: float = 6.0
    classes: int = 3
    scale: float = 3.0  #: of W at the centre; a larger scale gives less random labels

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes < 2:
            raise FedalignError(f"data.classes must be at least 2, not {self.classes}")

    def clients(self, draw: np.random.Generator) -> list[tuple[Array, npt.NDArray[np.generic]]]:
        """Draw every client's samples, and their labels from its softmax model."""
        drawn: list[tuple[Array, npt.NDArray[np.generic]]] = []
        for w in self.optima(draw, self.classes * self.dimensions, self.scale):
            x = draw.normal(size=(self.samples, self.dimensions))
            x /= np.linalg.norm(x, axis=1, keepdims=True)
            scores = x @ w.reshape(self.classes, -1).T
            drawn.append((x, (scores + draw.gumbel(size=scores.shape)).argmax(1)))  # a draw from the softmax
        return drawn


@functools.lru_cache(maxsize=4)
def _made(data: Convex) -> Federation:
    clients = data.clients(np.random.default_rng(data.data_seed))
    flags = [k < data.priority for k in range(len(clients))]
    return Federation.from_arrays(clients, priority=flags, heldout_fraction=0.0, seed=0)
