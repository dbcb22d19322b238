"""Objectives of single clients, in double precision: least squares and multinomial logistic regression.

``F_k(w)`` is the mean loss over the client's samples plus ``l2/2·‖w‖²``; ``w`` holds the weights of a linear model
without bias as one vector.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from fedalign.theory.minimise import Array, minimise


@dataclass(frozen=True, eq=False)
class Objective(abc.ABC):
    """The objective of one client: its samples ``x`` and ``y``, and the weight ``l2`` of the regulariser."""

    quadratic: ClassVar[bool] = False  #: whether the Hessian is the same everywhere

    x: Array
    y: Array  #: targets, or class numbers
    l2: float = 0.0

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of weights."""

    @abc.abstractmethod
    def value(self, w: Array) -> float:
        """Return F_k(w), with the regulariser."""

    @abc.abstractmethod
    def sample_gradients(self, w: Array) -> Array:
        """Return the gradient of each sample's loss, with the regulariser (samples × weights)."""

    @abc.abstractmethod
    def hessian(self, w: Array) -> Array:
        """Return the second derivative of F_k at ``w``."""

    @abc.abstractmethod
    def curvature(self) -> tuple[float, float]:
        """Return bounds μ and L on the eigenvalues of the Hessian that hold for every ``w``."""

    def gradient(self, w: Array) -> Array:
        """Return the gradient of F_k at ``w``, with the regulariser."""
        mean: Array = self.sample_gradients(w).mean(0)
        return mean

    def noise(self, w: Array, batch: int | None) -> tuple[float, float]:
        """Return the variance and the second moment of the gradient on a batch drawn without replacement."""
        gradients = self.sample_gradients(w)
        mean = gradients.mean(0)
        variance = thinning(len(gradients), batch) * float(np.square(gradients - mean).sum(1).mean())
        return variance, variance + float(mean @ mean)

    @cached_property
    def minimiser(self) -> Array:
        """The weights w_k* that minimise F_k."""
        return minimise([self], np.ones(1))


def thinning(samples: int, batch: int | None) -> float:
    """Return the variance of the mean of a batch drawn without replacement, relative to the variance of one sample.

    >>> thinning(10, 1), thinning(10, 10), thinning(10, None)
    (1.0, 0.0, 0.0)
    """
    if batch is None or batch >= samples:
        return 0.0
    return (samples - batch) / ((samples - 1) * batch)


@dataclass(frozen=True, eq=False)
class LeastSquares(Objective):
    """Least squares: the mean of (x·w − y)², plus the regulariser."""

    quadratic: ClassVar[bool] = True

    @property
    def size(self) -> int:
        """The number of weights of the linear model."""
        return int(self.x.shape[1])

    def value(self, w: Array) -> float:
        """Return F_k(w), with the regulariser."""
        return float(np.square(self.x @ w - self.y).mean() + self.l2 / 2 * (w @ w))

    def sample_gradients(self, w: Array) -> Array:
        """Return the gradient of each sample's loss, with the regulariser."""
        gradients: Array = 2 * self.x * (self.x @ w - self.y)[:, None] + self.l2 * w
        return gradients

    def hessian(self, w: Array) -> Array:
        """Return the second derivative of F_k at ``w``."""
        return self._hessian

    @cached_property
    def _hessian(self) -> Array:
        found: Array = 2 * self.x.T @ self.x / len(self.x) + self.l2 * np.eye(self.size)
        return found

    def curvature(self) -> tuple[float, float]:
        """Return bounds μ and L on the eigenvalues of the Hessian."""
        values = np.linalg.eigvalsh(self._hessian)
        return float(values[0]), float(values[-1])


@dataclass(frozen=True, eq=False)
class Softmax(Objective):
    """Logistic regression: the mean cross-entropy of softmax(W·x), plus the regulariser; W has a row for each class."""

    classes: int = 2

    @property
    def size(self) -> int:
        """The number of weights of the linear model."""
        return int(self.classes * self.x.shape[1])

    def value(self, w: Array) -> float:
        """Return F_k(w), with the regulariser."""
        scores = self.x @ w.reshape(self.classes, -1).T
        top = scores.max(1)
        total = top + np.log(np.exp(scores - top[:, None]).sum(1))
        return float((total - scores[np.arange(len(scores)), self.y.astype(np.int64)]).mean() + self.l2 / 2 * (w @ w))

    def sample_gradients(self, w: Array) -> Array:
        """Return the gradient of each sample's loss, with the regulariser."""
        wrong = self._probabilities(w)
        wrong[np.arange(len(wrong)), self.y.astype(np.int64)] -= 1
        outer: Array = (wrong[:, :, None] * self.x[:, None, :]).reshape(len(wrong), -1) + self.l2 * w
        return outer

    def gradient(self, w: Array) -> Array:
        """Return the gradient of F_k at ``w``, with the regulariser."""
        wrong = self._probabilities(w)
        wrong[np.arange(len(wrong)), self.y.astype(np.int64)] -= 1
        mean: Array = (wrong.T @ self.x).reshape(-1) / len(wrong) + self.l2 * w
        return mean

    def hessian(self, w: Array) -> Array:
        """Return the second derivative of F_k at ``w``."""
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
        """Return bounds μ and L on the eigenvalues of the Hessian."""
        # diag(p) − p·pᵀ has no eigenvalue above 1/2, and 0 is one of them.
        return self.l2, self.l2 + float(np.linalg.eigvalsh(self.x.T @ self.x / len(self.x))[-1]) / 2

    def _probabilities(self, w: Array) -> Array:
        scores = self.x @ w.reshape(self.classes, -1).T
        raised = np.exp(scores - scores.max(1, keepdims=True))
        probabilities: Array = raised / raised.sum(1, keepdims=True)
        return probabilities
