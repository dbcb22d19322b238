"""The constants of the theorems, computed for a federation whose objectives are known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedalign.errors import FedalignError
from fedalign.theory.minimise import Array
from fedalign.theory.objectives import LeastSquares, thinning
from fedalign.theory.problem import Problem


@dataclass(frozen=True)
class Constants:
    """The constants that the bounds depend on.

    ``gaps`` are the Γ_k, ``distance`` is ‖w₀ − w*‖², ``local_steps`` is E. ``draws`` is K of Theorem 2, or None under
    full participation.
    """

    L: float
    mu: float
    local_steps: int
    heterogeneity: float  #: Γ
    gaps: tuple[float, ...]
    sigma2: float
    G2: float
    distance: float
    minimum: float  #: F*
    draws: int | None = None

    @property
    def gamma(self) -> float:
        """The constant γ = max(8L/μ, E) of the learning rate."""
        return max(8 * self.L / self.mu, float(self.local_steps))

    @property
    def c2(self) -> float:
        """The constant C₂ = 12L²/μ² of the bound."""
        return 12 * self.L**2 / self.mu**2

    @property
    def noise(self) -> float:
        """The noise term of a step: σ² + 8(E−1)²G², and in Theorem 2 another 8E²G²/K."""
        drift = 8 * (self.local_steps - 1) ** 2 * self.G2
        return self.sigma2 + drift + (8 * self.local_steps**2 * self.G2 / self.draws if self.draws else 0.0)

    def c1(self, *, printed: bool = False) -> float:
        """Return C₁. The printed version assumes γ = 8L/μ in its last term, which is too small if γ = E."""
        start = 4 * self.L**2 / self.mu if printed else self.L * self.gamma / 2
        return 2 * self.L / self.mu**2 * self.noise + start * self.distance

    def rate(self, t: int) -> float:
        """Return the learning rate η_t = 2/(μ(t + γ)) of local step ``t``."""
        return 2 / (self.mu * (t + self.gamma))


def constants(
    problem: Problem,
    start: Array,
    local_steps: int,
    batch: int | None = None,
    draws: int | None = None,
    radius: float | None = None,
    moments: tuple[float, float] | None = None,
) -> Constants:
    """Compute the constants of a run that starts at the weights ``start`` and makes ``local_steps`` steps a round.

    σ² and G² are bounds over a region. For logistic regression it is all that SGD can reach: the gradient of a
    sample's loss is at most √2·‖x‖, so with the regulariser no step leaves ‖w‖ ≤ max(‖w₀‖, √2·max‖x‖/l2). For least
    squares it is a ball around w*: ``radius`` contains the models that rounds start from, and is widened by
    2·‖w_k* − w*‖, because full-batch steps with η ≤ 1/L never move away from w_k*. ``moments`` gives σ² and G² if they
    are known exactly.

    Raises :class:`FedalignError` if some objective is not strongly convex.
    """
    curvatures = [o.curvature() for o in problem.objectives]
    mu, smooth = min(c[0] for c in curvatures), max(c[1] for c in curvatures)
    if not mu > 1e-12 * smooth:
        raise FedalignError("Assumption 2 fails: some client's objective is not strongly convex (give it weight_decay)")
    best = problem.minimiser
    minimum = problem.value(best)
    at_best = np.array([o.value(best) for o in problem.objectives])
    # Γ and Γ_k are at least 0: anything below comes from rounding.
    gaps = np.maximum(at_best - problem.minima, 0.0)
    heterogeneity = max(minimum - float(problem.p[problem.priority] @ problem.minima[problem.priority]), 0.0)
    distance = float(np.square(start - best).sum())
    sigma2, G2 = moments or _moments(problem, start, batch, math.sqrt(distance) if radius is None else radius)
    return Constants(
        smooth, mu, local_steps, heterogeneity, tuple(map(float, gaps)), sigma2, G2, distance, minimum, draws
    )


def _moments(problem: Problem, start: Array, batch: int | None, radius: float) -> tuple[float, float]:
    """Return bounds on the variance and the second moment of a gradient over the region."""
    sigma2 = G2 = 0.0
    best = problem.minimiser
    for o in problem.objectives:
        part = thinning(len(o.x), batch)
        if isinstance(o, LeastSquares):
            reach = radius + 2 * float(np.linalg.norm(o.minimiser - best))
            hessian, samples = o.hessian(best), o.sample_gradients(best)
            mean = samples.mean(0)
            # ‖2xxᵀ + l2 − H‖ is at most the larger of the two largest eigenvalues.
            own = np.maximum(2 * np.square(o.x).sum(1) + o.l2, np.linalg.eigvalsh(hessian)[-1])
            spread = own * reach + np.linalg.norm(samples - mean, axis=1)
            variance = part * float(np.square(spread).mean())
            slope = float(np.linalg.eigvalsh(hessian)[-1]) * reach + float(np.linalg.norm(mean))
        else:
            steepest = math.sqrt(2 * float(np.square(o.x).sum(1).max()))
            variance = part * steepest**2
            slope = steepest + o.l2 * max(float(np.linalg.norm(start)), steepest / o.l2)
        sigma2, G2 = max(sigma2, variance), max(G2, slope**2 + variance)
    return sigma2, G2
