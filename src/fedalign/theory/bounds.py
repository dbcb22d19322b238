"""Computes θ_T, ρ_T and the bounds on E[F(w_T)] − F* for a sequence of inclusions; docs/theory.md derives them.

``printed`` is Theorem 1 (or 2) as in the paper. ``corrected`` has the same form, but its sums start at i = 0 instead of
1, and the last term of C₁ contains γ. ``recursion`` applies the paper's one-step lemma step by step, and is the
tightest of the three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedalign.protocol.records import History, RoundRecord
from fedalign.theory.constants import Constants
from fedalign.theory.minimise import Array


@dataclass(frozen=True)
class Bounds:
    """The values after 0, 1, 2, … rounds; ``T`` is the number of local steps so far."""

    T: Array
    theta: Array
    rho: Array
    printed: Array
    corrected: Array
    recursion: Array


def path_of(history: History, gaps: Sequence[float]) -> tuple[Array, Array]:
    """Return the factor ``1/(1 + Σ p_k I_k)`` and the bias ``Σ p_k I_k Γ_k / (1 + Σ p_k I_k)`` of every round."""
    factors = [r.inclusion for r in history.rounds]
    return np.array(factors), np.array([bias_of(r, gaps) for r in history.rounds])


def bias_of(record: RoundRecord, gaps: Sequence[float]) -> float:
    """Return the bias ``Σ p_k I_k Γ_k / (1 + Σ p_k I_k)`` of a round; ``gaps`` are the Γ_k of all clients."""
    return sum(c.weight * gaps[c.id] for c in record.clients if not c.priority)


def bounds(c: Constants, factors: Array, biases: Array) -> Bounds:
    """Bound the error after every round, given the factors and biases of :func:`path_of`.

    For the mean error of several runs, pass the means of their factors and biases.

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
    less = sums - first  # the sums in the paper omit i = 0
    printed = closed(less[0] * scale, 2 * c.L / c.mu * less[1] * scale, c.c1(printed=True))
    return Bounds(T.astype(float), theta, rho, printed, closed(theta, rho, c.c1()), _recursion(c, per_step)[T])


def _recursion(c: Constants, per_step: Array) -> Array:
    """Apply Δ_{t+1} ≤ (1 − μη)Δ_t + η²·(noise + 6LΓ·factor) + 2η·bias at every step; return L/2·Δ_t."""
    distances = [c.distance]
    for t, (factor, bias) in enumerate(per_step.T):
        rate = c.rate(t)
        added = rate**2 * (c.noise + 6 * c.L * c.heterogeneity * factor) + 2 * rate * bias
        distances.append((1 - c.mu * rate) * distances[-1] + added)
    return c.L / 2 * np.array(distances)
