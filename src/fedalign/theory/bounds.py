"""θ_T, ρ_T and the bounds on E[F(w_T)] − F*, along a path of inclusions. docs/theory.md derives them.

``printed`` is the paper's Theorem 1 (or 2). ``corrected`` has the same form with the sums from i = 0, where the paper's
begin at 1, and with γ in C₁'s last term. ``recursion`` is the paper's one-step lemma applied step after step: the
sharpest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedalign.protocol.records import History, RoundRecord
from fedalign.theory.constants import Constants
from fedalign.theory.problem import Array


@dataclass(frozen=True)
class Bounds:
    """Values after 0, 1, 2, … rounds; ``T`` counts local steps."""

    T: Array
    theta: Array
    rho: Array
    printed: Array
    corrected: Array
    recursion: Array


def path_of(history: History, gaps: Sequence[float]) -> tuple[Array, Array]:
    """Give every round's factor ``1/(1 + Σ p_k I_k)`` and bias ``Σ p_k I_k Γ_k / (1 + Σ p_k I_k)``."""
    factors = [r.inclusion for r in history.rounds]
    return np.array(factors), np.array([bias_of(r, gaps) for r in history.rounds])


def bias_of(record: RoundRecord, gaps: Sequence[float]) -> float:
    """Give a round's bias ``Σ p_k I_k Γ_k / (1 + Σ p_k I_k)``: free clients' shares times their Γ_k."""
    return sum(c.weight * gaps[c.id] for c in record.clients if not c.priority)


def bounds(c: Constants, factors: Array, biases: Array) -> Bounds:
    """Bound the error after every round of a path; for the mean over several runs give the means of their paths.

    >>> c = Constants(1.0, 1.0, 1, 0.0, (0.0,), 0.0, 0.0, distance=2.0, minimum=0.0)
    >>> b = bounds(c, np.ones(2), np.zeros(2))
    >>> b.corrected.tolist() == [8 / (8 + t) for t in range(3)]
    True
    """
    E, gamma = c.local_steps, c.gamma
    T = E * np.arange(len(factors) + 1)
    per_step = np.repeat(np.stack([factors, biases]), E, axis=1)
    sums = np.concatenate([np.zeros((2, 1)), np.cumsum(per_step, axis=1)], axis=1)[:, T]
    first = np.where(T > 0, np.array([factors[:1].sum(), biases[:1].sum()])[:, None], 0.0)
    scale = 1 / (T + gamma - 2)

    def closed(theta: Array, rho: Array, start: float) -> Array:
        total: Array = (start + c.c2 * c.heterogeneity * theta) / (T + gamma) + rho
        return total

    theta, rho = sums[0] * scale, 2 * c.L / c.mu * sums[1] * scale
    less = sums - first  # the paper's sums leave i = 0 out
    printed = closed(less[0] * scale, 2 * c.L / c.mu * less[1] * scale, c.c1(printed=True))
    return Bounds(T.astype(float), theta, rho, printed, closed(theta, rho, c.c1()), _recursion(c, per_step)[T])


def _recursion(c: Constants, per_step: Array) -> Array:
    """Apply Δ_{t+1} ≤ (1 − μη)Δ_t + η²·(noise + 6LΓ·factor) + 2η·bias; give L/2·Δ_t."""
    distances = [c.distance]
    for t, (factor, bias) in enumerate(per_step.T):
        rate = c.rate(t)
        added = rate**2 * (c.noise + 6 * c.L * c.heterogeneity * factor) + 2 * rate * bias
        distances.append((1 - c.mu * rate) * distances[-1] + added)
    return c.L / 2 * np.array(distances)
