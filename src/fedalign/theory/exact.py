"""Computes the expected error of least squares exactly, by propagating second moments of the weights step by step.

With z = (w, 1), an SGD step of a client is linear in z, with a random matrix. The mean of that matrix, and its effect
on E[z·zᵀ], are known for batches drawn without replacement. Given the model at the start of a round, the noise of
different clients is independent. So E[F(w_T)] follows exactly, if the inclusions do not depend on the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedalign.errors import FedalignError
from fedalign.theory.minimise import Array
from fedalign.theory.objectives import LeastSquares, thinning
from fedalign.theory.problem import Problem


@dataclass(frozen=True)
class Expected:
    """``errors`` is E[F(w)] − F* after 0, 1, 2, … rounds; ``sigma2`` and ``G2`` are the largest that occurred."""

    errors: Array
    sigma2: float
    G2: float


class _ClientStep:
    """How an SGD step of one client changes E[z·zᵀ]."""

    def __init__(self, objective: LeastSquares, batch: int | None) -> None:
        x, y, n = objective.x, objective.y.astype(np.float64), len(objective.x)
        d = objective.size
        self._rows = np.concatenate([2 * x, np.zeros((n, 1))], axis=1)  # the matrix of sample i is rowᵢ ⊗ (xᵢ, −yᵢ)
        self._last = np.concatenate([x, -y[:, None]], axis=1)
        self._decay = objective.l2 * np.diag([1.0] * d + [0.0])
        self.mean = self._rows.T @ self._last / n + self._decay
        self._part = thinning(n, batch)

    def step(self, moment: Array, rate: float) -> tuple[Array, float, float]:
        """Return the moment after a step, and the variance and the second moment of the gradient."""
        mean = self.mean @ moment @ self.mean.T
        variance = np.zeros_like(mean)
        if self._part:
            n = len(self._rows)
            sizes = np.einsum("ni,ij,nj->n", self._last, moment, self._last)  # E[(x·w − y)²] of each sample
            plain = self.mean - self._decay
            each = (self._rows * sizes[:, None]).T @ self._rows / n
            variance = self._part * (each - plain @ moment @ plain.T)
        cross = self.mean @ moment
        after = moment - rate * (cross + cross.T) + rate**2 * (mean + variance)
        noise = float(np.trace(variance))
        return after, noise, noise + float(np.trace(mean))


def expected(
    problem: Problem,
    included: npt.NDArray[np.bool_],
    start: Array,
    local_steps: int,
    rate: Callable[[int], float],
    batch: int | None = None,
) -> Expected:
    """Compute the expected error after every round, and the largest σ² and G² on the way.

    ``included`` marks the free clients that each round includes (rounds × clients), ``rate`` gives η_t of local step t.
    All objectives must be least squares.
    """
    parts = []
    for o in problem.objectives:
        if not isinstance(o, LeastSquares):
            raise FedalignError("the exact expected error is known only for least squares")
        parts.append(_ClientStep(o, batch))
    z = np.append(start, 1.0)
    moment, best = np.outer(z, z), problem.minimiser
    pairs = zip(problem.objectives, problem.p * problem.priority, strict=True)
    hessian = sum(p * o.hessian(best) for o, p in pairs)
    to_error = np.concatenate([np.eye(len(best)), -best[:, None]], axis=1)

    def error() -> float:
        return float(np.trace(hessian @ to_error @ moment @ to_error.T)) / 2

    errors, sigma2, G2 = [error()], 0.0, 0.0
    for round, chosen in enumerate(included):
        shares = problem.p * (problem.priority | chosen)
        shares = shares / shares.sum()
        mean_map, own = np.zeros_like(moment), np.zeros_like(moment)
        for part, share in zip(parts, shares, strict=True):
            if not share:
                continue
            now, through = moment, np.eye(len(moment))
            for step in range(local_steps):
                eta = rate(round * local_steps + step)
                now, variance, second = part.step(now, eta)
                through = through - eta * part.mean @ through
                sigma2, G2 = max(sigma2, variance), max(G2, second)
            own += share**2 * (now - through @ moment @ through.T)
            mean_map += share * through
        moment = mean_map @ moment @ mean_map.T + own
        errors.append(error())
    return Expected(np.array(errors), sigma2, G2)
