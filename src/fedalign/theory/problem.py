"""Strongly convex federations in double precision: every client's objective, and the minimisers the theory speaks of.

``F_k(w) = mean over its samples of the loss + l2/2·‖w‖²``, for least squares ``(x·w − y)²`` and for multinomial
logistic regression; ``w`` is the flat weight of a linear model without bias.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedalign.errors import FedalignError

Array = npt.NDArray[np.float64]
_SOLVED = 1e-10  # of a minimiser's gradient


@dataclass(frozen=True, eq=False)
class Objective(abc.ABC):
    """One client's objective."""

    x: Array
    y: Array  #: targets, or classes
    l2: float = 0.0

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """How many weights there are."""

    @abc.abstractmethod
    def value(self, w: Array) -> float:
        """Give F_k(w)."""

    @abc.abstractmethod
    def sample_gradients(self, w: Array) -> Array:
        """Give the gradient of every sample's loss, the regulariser included."""

    @abc.abstractmethod
    def hessian(self, w: Array) -> Array:
        """Give the second derivative."""

    @abc.abstractmethod
    def curvature(self) -> tuple[float, float]:
        """Give bounds μ and L of the Hessian's eigenvalues, everywhere."""

    def gradient(self, w: Array) -> Array:
        """Give ∇F_k(w)."""
        mean: Array = self.sample_gradients(w).mean(0)
        return mean

    def noise(self, w: Array, batch: int | None) -> tuple[float, float]:
        """Give, for a batch drawn without replacement, the gradient's variance and its second moment."""
        gradients = self.sample_gradients(w)
        mean = gradients.mean(0)
        variance = thinning(len(gradients), batch) * float(np.square(gradients - mean).sum(1).mean())
        return variance, variance + float(mean @ mean)

    @cached_property
    def minimiser(self) -> Array:
        """The w that minimises F_k."""
        return _minimise([self], np.ones(1))


def thinning(samples: int, batch: int | None) -> float:
    """Give the factor from a sample's variance to that of the mean of a batch without replacement.

    >>> thinning(10, 1), thinning(10, 10), thinning(10, None)
    (1.0, 0.0, 0.0)
    """
    if batch is None or batch >= samples:
        return 0.0
    return (samples - batch) / ((samples - 1) * batch)


@dataclass(frozen=True, eq=False)
class LeastSquares(Objective):
    """Mean of (x·w − y)², plus the regulariser."""

    @property
    def size(self) -> int:
        """How many weights there are."""
        return int(self.x.shape[1])

    def value(self, w: Array) -> float:
        """Give F_k(w)."""
        return float(np.square(self.x @ w - self.y).mean() + self.l2 / 2 * (w @ w))

    def sample_gradients(self, w: Array) -> Array:
        """Give every sample's gradient."""
        gradients: Array = 2 * self.x * (self.x @ w - self.y)[:, None] + self.l2 * w
        return gradients

    def hessian(self, w: Array) -> Array:
        """Give the second derivative."""
        return self._hessian

    @cached_property
    def _hessian(self) -> Array:
        found: Array = 2 * self.x.T @ self.x / len(self.x) + self.l2 * np.eye(self.size)
        return found

    def curvature(self) -> tuple[float, float]:
        """Give bounds of its eigenvalues."""
        values = np.linalg.eigvalsh(self._hessian)
        return float(values[0]), float(values[-1])


@dataclass(frozen=True, eq=False)
class Softmax(Objective):
    """Mean cross-entropy of softmax(W·x), plus the regulariser; W has a row for each class."""

    classes: int = 2

    @property
    def size(self) -> int:
        """How many weights there are."""
        return int(self.classes * self.x.shape[1])

    def value(self, w: Array) -> float:
        """Give F_k(w)."""
        scores = self.x @ w.reshape(self.classes, -1).T
        top = scores.max(1)
        total = top + np.log(np.exp(scores - top[:, None]).sum(1))
        return float((total - scores[np.arange(len(scores)), self.y.astype(np.int64)]).mean() + self.l2 / 2 * (w @ w))

    def sample_gradients(self, w: Array) -> Array:
        """Give every sample's gradient."""
        wrong = self._probabilities(w)
        wrong[np.arange(len(wrong)), self.y.astype(np.int64)] -= 1
        outer: Array = (wrong[:, :, None] * self.x[:, None, :]).reshape(len(wrong), -1) + self.l2 * w
        return outer

    def gradient(self, w: Array) -> Array:
        """Give ∇F_k(w)."""
        wrong = self._probabilities(w)
        wrong[np.arange(len(wrong)), self.y.astype(np.int64)] -= 1
        mean: Array = (wrong.T @ self.x).reshape(-1) / len(wrong) + self.l2 * w
        return mean

    def hessian(self, w: Array) -> Array:
        """Give the second derivative."""
        p = self._probabilities(w)
        d = self.x.shape[1]
        found = np.zeros((self.classes, d, self.classes, d))
        for a in range(self.classes):
            for b in range(a + 1):
                weight = p[:, a] * ((a == b) - p[:, b])
                block = (self.x * weight[:, None]).T @ self.x / len(p)
                found[a, :, b, :] = found[b, :, a, :] = block
        return found.reshape(self.size, self.size) + self.l2 * np.eye(self.size)

    def curvature(self) -> tuple[float, float]:
        """Give bounds of its eigenvalues."""
        # diag(p) − p·pᵀ has no eigenvalue above 1/2, and 0 is one of them.
        return self.l2, self.l2 + float(np.linalg.eigvalsh(self.x.T @ self.x / len(self.x))[-1]) / 2

    def _probabilities(self, w: Array) -> Array:
        scores = self.x @ w.reshape(self.classes, -1).T
        raised = np.exp(scores - scores.max(1, keepdims=True))
        probabilities: Array = raised / raised.sum(1, keepdims=True)
        return probabilities


@dataclass(frozen=True, eq=False)
class Problem:
    """A federation's objectives. F is the priority clients' mean, with weights ``p`` that sum to 1 over them."""

    objectives: Sequence[Objective]
    priority: npt.NDArray[np.bool_]
    p: Array

    def __post_init__(self) -> None:
        if not self.priority.any():
            raise FedalignError("there is no priority client, so there is no objective")

    @property
    def size(self) -> int:
        """How many weights there are."""
        return self.objectives[0].size

    def value(self, w: Array) -> float:
        """Give F(w)."""
        return float(sum(p * o.value(w) for o, p in self._of_priority()))

    @cached_property
    def minimiser(self) -> Array:
        """w*, which minimises F."""
        pairs = self._of_priority()
        return _minimise([o for o, _ in pairs], np.array([p for _, p in pairs]))

    @cached_property
    def minima(self) -> Array:
        """Every client's own F_k*."""
        return np.array([o.value(o.minimiser) for o in self.objectives])

    def _of_priority(self) -> list[tuple[Objective, float]]:
        return [
            (o, float(p))
            for o, is_priority, p in zip(self.objectives, self.priority, self.p, strict=True)
            if is_priority
        ]


def _minimise(objectives: Sequence[Objective], weights: Array) -> Array:
    first = objectives[0]
    if isinstance(first, LeastSquares):
        hessian = sum(p * o.hessian(o.x[0]) for o, p in zip(objectives, weights, strict=True))
        slope = sum(p * o.gradient(np.zeros(o.size)) for o, p in zip(objectives, weights, strict=True))
        solved: Array = -np.linalg.solve(hessian, slope)
        return solved
    try:
        from scipy.optimize import minimize
    except ImportError as error:
        raise FedalignError("scipy is not installed, which finds minimisers: pip install 'fedalign[theory]'") from error

    def total(name: str, w: Array) -> Array:
        parts: Array = sum(p * getattr(o, name)(w) for o, p in zip(objectives, weights, strict=True))
        return parts

    found = minimize(
        lambda w: float(total("value", w)),
        np.zeros(first.size),
        jac=lambda w: total("gradient", w),
        hess=lambda w: total("hessian", w),
        method="trust-exact",
        options={"gtol": _SOLVED, "maxiter": 500},
    )
    left = float(np.abs(total("gradient", found.x)).max())
    if left > 1e3 * _SOLVED:  # the solver stops where rounding hides the descent; that may be a little earlier
        raise FedalignError(f"the minimiser was not found: a gradient of {left:.1e} is left")
    solution: Array = found.x
    return solution
