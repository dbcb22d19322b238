"""The factor of an attack that moves an aggregate farthest from the honest mean, found by a line search."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fedalign.aggregation.aggregator import Aggregator

_EVALUATIONS, _STEP, _RATIO = 20, 10.0, 0.8  # as byzfl has them, so that results can be compared


def strongest_factor(
    aggregator: Aggregator, known: torch.Tensor, hostile: int, craft: Callable[[torch.Tensor, float], torch.Tensor]
) -> float:
    """Return the factor at which ``hostile`` copies of ``craft(known, factor)`` do the most harm.

    Harm is the distance of the aggregate of ``known`` (honest updates in rows) and the crafted updates from the honest
    mean. The search goes up from 0 in steps that double while the harm grows. Then it tries steps that shrink from the
    best factor so far on. It aggregates 20 times, in double precision and with equal shares.

    >>> from fedalign.aggregation.median import CoordinateMedian
    >>> honest = torch.tensor([[0.0], [1.0], [2.0]])
    >>> strongest_factor(CoordinateMedian(), honest, 2, lambda known, factor: known.mean(0) + factor * known.std(0))
    10.0
    """
    honest = known.double()
    mean = honest.mean(0)
    rows = len(honest) + hostile
    shares = honest.new_full((rows,), 1 / rows)

    def harm(factor: float) -> float:
        crafted = craft(honest, factor).expand(hostile, -1)
        return float((aggregator.combine(torch.cat([honest, crafted]), shares) - mean).norm())

    best, most = 0.0, harm(0.0)
    step, expanding = _STEP, True
    for _ in range(_EVALUATIONS - 1):
        found = harm(best + step)
        better = found > most
        if better:
            best, most = best + step, found
        expanding = expanding and better
        step *= 2 if expanding else _RATIO
    return best
