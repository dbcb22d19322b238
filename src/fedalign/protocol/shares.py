"""Who has which part of a mean: of an aggregate's clients, and of the priority clients' measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Candidate, Measure
from fedalign.training.participation import Presence


def shares_of(
    roster: Roster, presence: Presence, admitted: Sequence[int], candidate: Candidate | None = None
) -> dict[int, float]:
    """Give each admitted client its normalised weight: ``p_k``, or ``c_k/K`` for one drawn ``c_k`` times of ``K``."""
    draws = presence.draws
    total_draws = sum(draws.values()) if draws else 0
    weights = {k: draws[k] / total_draws if draws and roster.priority[k] else float(roster.p[k]) for k in admitted}
    if candidate is not None and (candidate.weight or candidate.scale):
        # Weights beside the priority clients' 1, of which only those that are here have a part.
        here = math.fsum(weights[k] for k in admitted if roster.priority[k])
        weights |= {k: weight * here for k, weight in candidate.weight.items()}
        weights = {k: weight * candidate.scale.get(k, 1.0) for k, weight in weights.items()}
    total = math.fsum(weights.values())
    return {k: weight / total for k, weight in weights.items()}


def weighted(roster: Roster, own: Mapping[int, Measure]) -> tuple[float, float | None]:
    """Average loss and accuracy with weights ``p_k`` over the clients that are there."""
    total = math.fsum(float(roster.p[k]) for k in own)
    loss = math.fsum(float(roster.p[k]) * m.loss for k, m in own.items()) / total
    accuracies = [(float(roster.p[k]), m.accuracy) for k, m in own.items() if m.accuracy is not None]
    if len(accuracies) < len(own):
        return loss, None
    return loss, math.fsum(p * a for p, a in accuracies) / total
