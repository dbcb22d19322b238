"""Federations for the theory's experiments: the same data in every run, so that seeds differ by their batches alone.

Priority clients' optima lie around a centre, ``spread`` away; free client j of M has its optimum ``shift·(j + ½)/M``
away from the centre, in a direction of its own: from well aligned to far off.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedalign.errors import FedalignError
from fedalign.federation import Federation

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Quadratic:
    """Least squares of known curvature: the Hessian of every client's mean (x·w − y)² has eigenvalues mu to L."""

    priority: int = 4
    free: int = 8
    dimensions: int = 5
    samples: int = 40
    mu: float = 0.5
    L: float = 2.0
    spread: float = 0.5
    shift: float = 2.0
    noise: float = 0.5  #: standard deviation of y around x·w
    data_seed: int = 0

    def __post_init__(self) -> None:
        _check(self.priority, self.free, self.dimensions, self.samples)
        if not 0 < self.mu <= self.L:
            raise FedalignError(f"data.mu and data.L must be positive, mu at most L, not {self.mu} and {self.L}")
        if self.samples < self.dimensions:
            raise FedalignError(f"data.samples must be at least data.dimensions, {self.dimensions}, not {self.samples}")

    def federation(self, seed: int) -> Federation:
        """Give the federation; ``seed`` changes nothing."""
        return _made(self)

    def make(self) -> Federation:
        """Make the federation."""
        draw = np.random.default_rng(self.data_seed)
        root = np.sqrt(np.linspace(self.mu, self.L, self.dimensions) * self.samples / 2)
        clients = []
        for w in _optima(draw, self.priority, self.free, self.dimensions, self.spread, self.shift):
            left = np.linalg.qr(draw.normal(size=(self.samples, self.dimensions)))[0]
            right = np.linalg.qr(draw.normal(size=(self.dimensions, self.dimensions)))[0]
            x = left * root @ right
            clients.append((x, (x @ w + self.noise * draw.normal(size=self.samples))[:, None]))
        return _federation(clients, self.priority)


@dataclass(frozen=True)
class Multinomial:
    """Labels drawn from softmax(W·x) with x on the unit sphere."""

    priority: int = 4
    free: int = 8
    dimensions: int = 6
    classes: int = 3
    samples: int = 60
    spread: float = 1.0
    shift: float = 6.0
    scale: float = 3.0  #: of the centre's W: how sure the labels are
    data_seed: int = 0

    def __post_init__(self) -> None:
        _check(self.priority, self.free, self.dimensions, self.samples)
        if self.classes < 2:
            raise FedalignError(f"data.classes must be at least 2, not {self.classes}")

    def federation(self, seed: int) -> Federation:
        """Give the federation; ``seed`` changes nothing."""
        return _made(self)

    def make(self) -> Federation:
        """Make the federation."""
        draw = np.random.default_rng(self.data_seed)
        size = self.classes * self.dimensions
        clients = []
        for w in _optima(draw, self.priority, self.free, size, self.spread, self.shift, self.scale):
            x = draw.normal(size=(self.samples, self.dimensions))
            x /= np.linalg.norm(x, axis=1, keepdims=True)
            scores = x @ w.reshape(self.classes, -1).T
            clients.append((x, (scores + draw.gumbel(size=scores.shape)).argmax(1)))  # a draw from the softmax
        return _federation(clients, self.priority)


@functools.lru_cache(maxsize=4)
def _made(data: Quadratic | Multinomial) -> Federation:
    return data.make()


def _optima(
    draw: np.random.Generator, priority: int, free: int, size: int, spread: float, shift: float, scale: float = 1.0
) -> list[Array]:
    centre = scale * draw.normal(size=size)
    away = [spread] * priority + [shift * (j + 0.5) / free for j in range(free)]
    directions = draw.normal(size=(len(away), size))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return [centre + far * direction for far, direction in zip(away, directions, strict=True)]


def _federation(clients: list[tuple[Array, npt.NDArray[np.generic]]], priority: int) -> Federation:
    return Federation.from_arrays(
        clients, priority=[k < priority for k in range(len(clients))], heldout_fraction=0.0, seed=0
    )


def _check(priority: int, free: int, dimensions: int, samples: int) -> None:
    for name, value, least in (
        ("priority", priority, 1), ("free", free, 0), ("dimensions", dimensions, 1), ("samples", samples, 2),
    ):  # fmt: skip
        if value < least:
            raise FedalignError(f"data.{name} must be at least {least}, not {value}")
