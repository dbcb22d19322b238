"""Losses at the best temperature: how well a model tells classes apart, whatever confidence it claims.

A model that trained on few samples is overconfident: its loss on held-out samples is high although many of its answers
are right. Whatever makes its outputs smaller then lowers the loss, wrong labels included, and a comparison of plain
losses would welcome clients that send them. So the outputs are divided by a temperature before the loss is computed,
and each model is judged at the temperature that is best for it (Guo et al., 2017). Clients report the loss at all of
:data:`TEMPERATURES`, and the server takes the minimum of their mean: one temperature for all clients.

A ledger compares many models of one round, and takes one temperature for all of them (:func:`softening`). Were each
judged at its own, a client that shrinks the outputs of a model too little trained would be credited: a temperature
below 1 makes up for the confidence that it costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul

import numpy as np

from fedalign.protocol.aggregate import weighted_mean
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Measure

_PLACES = np.arange(-100, 101) / 100  # between a point of a curve and its neighbours
TEMPERATURES = tuple(2.0 ** (i / 2) for i in range(-10, 13))  #: from 1/32 to 64, neighbours differ by a factor of √2


def calibrated_mean(roster: Roster, measures: Mapping[int, Measure]) -> tuple[float, float | None]:
    """Average like :func:`weighted_mean`, with the loss at the best temperature.

    The plain loss is taken where it is not finite, and where a client has no losses at other temperatures, as with a
    loss function that does not take logits.

    >>> roster, plain = Roster(("a",), (True,), (9,)), Measure(3.0, 0.5, 9)
    >>> calibrated_mean(roster, {0: plain})
    (3.0, 0.5)
    >>> tempered = tuple(1.0 + abs(math.log2(t) - 2) for t in TEMPERATURES)
    >>> calibrated_mean(roster, {0: Measure(3.0, 0.5, 9, tempered)})
    (1.0, 0.5)
    """
    loss, accuracy = weighted_mean(roster, measures)
    if not math.isfinite(loss) or not has_temperatures(measures):
        return loss, accuracy
    return lowest([loss_at(roster, measures, place) for place in range(len(TEMPERATURES))]), accuracy


def has_temperatures(measures: Mapping[int, Measure]) -> bool:
    """Say whether every client has a loss at every temperature; with a loss that takes no logits, none has."""
    return all(len(m.tempered) == len(TEMPERATURES) for m in measures.values())


def loss_at(roster: Roster, measures: Mapping[int, Measure], place: int) -> float:
    """Return the clients' mean loss at one of :data:`TEMPERATURES`, by its place there.

    >>> roster, tempered = Roster(("a",), (True,), (9,)), tuple(map(float, range(len(TEMPERATURES))))
    >>> loss_at(roster, {0: Measure(3.0, 0.5, 9, tempered)}, 4)
    4.0
    """
    weights = [float(roster.p[k]) for k in measures]
    return math.fsum(map(mul, weights, (m.tempered[place] for m in measures.values()))) / math.fsum(weights)


def softening(roster: Roster, measures: Mapping[int, Measure]) -> int | None:
    """Return the place of the best temperature of a model that is not below 1; None if clients have none.

    An overconfident model is softened, and an unsure one is left as it is.

    >>> roster, unsure = Roster(("a",), (True,), (9,)), tuple(map(float, range(len(TEMPERATURES))))
    >>> TEMPERATURES[softening(roster, {0: Measure(3.0, 0.5, 9, unsure)})]
    1.0
    >>> TEMPERATURES[softening(roster, {0: Measure(3.0, 0.5, 9, unsure[::-1])})]
    64.0
    """
    if not measures or not has_temperatures(measures):
        return None
    first = TEMPERATURES.index(1.0)
    losses = {place: loss_at(roster, measures, place) for place in range(first, len(TEMPERATURES))}
    return min((place for place, loss in losses.items() if math.isfinite(loss)), key=losses.__getitem__, default=first)


def lowest(curve: Sequence[float]) -> float:
    """Return the lowest point of a curve with equal steps, also between them: of the polynomial through five values.

    >>> round(lowest([(i - 2.25) ** 2 for i in range(6)]), 4)
    0.0
    """
    i = min(range(len(curve)), key=curve.__getitem__)
    around = curve[max(0, i - 2) : i + 3]
    if len(around) < 5 or not all(map(math.isfinite, around)):
        return curve[i]
    a, b, c, d, e = around
    first, second = (a - 8 * b + 8 * d - e) / 12, (-a + 16 * b - 30 * c + 16 * d - e) / 24
    third, fourth = (-a + 2 * b - 2 * d + e) / 12, (a - 4 * b + 6 * c - 4 * d + e) / 24
    x = _PLACES
    return float((c + x * (first + x * (second + x * (third + x * fourth)))).min())
