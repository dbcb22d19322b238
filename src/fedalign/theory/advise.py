"""Suggests the ε that minimises the bound, from the losses after a short warm-up of the priority clients.

A round adds ``η²·6LΓ·θ + 2η·b`` to the bound's recursion, with ``θ = 1/(1 + Σ p_k I_k)`` and ``b = θ·Σ p_k I_k Γ_k``:
free clients reduce the first term and add the second. Including a client lowers the bound only if ``2ηΓ_k`` is below
what the round adds without it, so at most while ``Γ_k ≤ 3LηΓ``; as η falls, fewer clients qualify. The rule sees gaps
``|F_k(w) − F(w)|``, not Γ_k. So the candidates are the values of ε that separate the gaps of the warm-up model, and the
advice is the one for which a round adds least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedalign.theory.bounds import bounds
from fedalign.theory.constants import Constants
from fedalign.theory.minimise import Array
from fedalign.theory.problem import Problem


@dataclass(frozen=True)
class Piece:
    """One piece of the schedule: the ε from ``round`` on.

    ``clients`` is the number of free clients whose gap at the warm-up is at most ε, ``rate`` is η at the first round.
    """

    round: int
    epsilon: float
    clients: int
    rate: float
    worth: float  #: 3LηΓ, the largest Γ_k at which including a first client can lower the bound


@dataclass(frozen=True)
class Advice:
    """A suggested schedule of ε, and bounds for it, ε = 0 and ε = ∞ if the gaps stay as at the warm-up."""

    pieces: tuple[Piece, ...]
    gaps: Array
    bounds: dict[str, float]


def advise(problem: Problem, c: Constants, losses: Array, rounds: int) -> Advice:
    """Suggest ε for every round; ``losses`` are F_k(w) of all clients at the model ``w`` of the warm-up."""
    free = ~problem.priority
    total = float(problem.p[problem.priority] @ losses[problem.priority])
    gaps = np.abs(losses - total)[free]
    weights, costs = problem.p[free], np.array(c.gaps)[free]
    cuts = _cuts(gaps)
    sets = np.array([gaps <= cut for cut in cuts]).reshape(len(cuts), len(gaps))
    theta = 1 / (1 + sets @ weights)
    bias = theta * (sets @ (weights * costs))
    pieces: list[Piece] = []
    path = []
    for round in range(rounds):
        rate = c.rate(round * c.local_steps)
        best = int(np.argmin(rate * 6 * c.L * c.heterogeneity * theta + 2 * bias))  # over η; a tie takes the smaller ε
        path.append(best)
        if not pieces or pieces[-1].epsilon != cuts[best]:
            worth = 3 * c.L * rate * c.heterogeneity
            pieces.append(Piece(round, float(cuts[best]), int(sets[best].sum()), rate, worth))
    choices = {"ε = 0": [0] * rounds, "ε = ∞": [len(cuts) - 1] * rounds, "advice": path}
    found = {name: float(bounds(c, theta[chosen], bias[chosen]).recursion[-1]) for name, chosen in choices.items()}
    return Advice(tuple(pieces), gaps, found)


def _cuts(gaps: Array) -> Sequence[float]:
    """Return values of ε midway between neighbouring gaps, which tolerate small changes; the last admits everyone."""
    ordered = np.unique(gaps)
    between = ((ordered[1:] + ordered[:-1]) / 2).tolist()
    return [0.0, *between, *([1.5 * float(ordered[-1]) or 1.0] if len(ordered) else [])]
