"""Free clients whose updates are too much alike: copies, and colluders that push the model in one direction."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from statistics import fmean, median, quantiles
from typing import Any

from fedalign.protocol.contributions import Verification, reputations
from fedalign.protocol.messages import Request, Resemble

ALIKE = "its update is too much like those of other free clients"
COPY = "its update is a copy of another free client's"
Cosines = Mapping[tuple[int, int], float]  #: of every two clients' updates

_TO_ONE = 1.5  # times as many spreads are asked of the resemblance to one client
_CLOSER = 20.0  # by this factor copies are closer, in 1 − cosine, than the closest two priority clients
_LEAST = 0.05  # above the median: by less, nobody is an outlier
_ROUNDING = 1e-6  # of four clients, the largest value can equal the limit; drivers round differently


def without_colluders(
    verification: Verification, before: Cosines
) -> Generator[Request, Any, tuple[Verification, Cosines]]:
    """Leave copies and colluders out of a round's verification. ``before`` has the cosines averaged over the rounds.

    Returns the cosines of every two free clients' updates as well, which include those that were left out.
    """
    measured = yield from _measured(verification)
    priority = set(verification.log.trained)
    free = {pair: cosine for pair, cosine in measured.items() if priority.isdisjoint(pair)}
    copied = copies(free, [cosine for pair, cosine in measured.items() if priority.issuperset(pair)])
    others = {pair: cosine for pair, cosine in free.items() if copied.isdisjoint(pair)}
    alike = too_much_alike(others, before, verification.rule.alike)
    return verification.without(copied, COPY).without(alike, ALIKE), free


def _measured(verification: Verification) -> Generator[Request, Any, Cosines]:
    """Return how much every two clients' updates are alike: their cosine.

    The cosines are those of the bounded updates less the mean update of all clients. Honest clients have little in
    common there: their data differ. Attackers that want the same have more. All free updates are brought to the same
    length first: else a long one would lose to the bounds what it shares with others.
    """
    clients, log = verification.probed, verification.log
    if len(clients) < 3 or math.isinf(verification.rule.alike):
        return {}
    usual = median(log.similarities[k].length for k in log.trained)
    mix = verification.mix(clients)
    cosines: Cosines = yield Resemble(replace(mix, step={k: usual / log.similarities[k].length for k in clients}))
    return cosines


def copies(free: Cosines, priority: Iterable[float]) -> set[int]:
    """Return the free clients to leave out because they send the same: of two copies one, and all of three or more.

    A copy is far closer to another update than any two priority clients' updates are to each other: where models have
    few parameters or clients few classes, honest updates are close, too. Attackers that all send one update would else
    look usual as soon as they are many.

    >>> sorted(copies({(4, 5): 1.0, (4, 6): 0.1, (5, 6): 0.1}, [0.0, 0.1]))
    [5]
    """
    limit = 1 - (1 - max([0.0, *priority])) / _CLOSER
    same: dict[int, set[int]] = {}
    for (i, j), cosine in free.items():
        if cosine >= limit:
            same.setdefault(i, {i}).add(j)
            same.setdefault(j, {j}).add(i)
    return {k for k, group in same.items() if len(group) > 2 or k != min(group)}


def too_much_alike(now: Cosines, before: Cosines, spreads: float) -> set[int]:
    """Return the clients that are outliers by their resemblance in this round, or by its average over the rounds.

    ``spreads`` is the limit: so many distances from the median to a quartile above the median; infinity lets all take
    part. Where clients' data differ much, some honest updates are alike, and the limit rises with them.

    >>> alike = {(i, j): 0.01 * (i + j) / 10 for i in range(8) for j in range(i)}
    >>> sorted(too_much_alike({**alike, (5, 4): 0.5}, {}, spreads=4.0))
    [4, 5]
    """
    if math.isinf(spreads):
        return set()
    average = reputations(before, now)
    return _outliers(now, spreads) | _outliers({pair: average[pair] for pair in now}, spreads)


def _outliers(cosines: Cosines, spreads: float) -> set[int]:
    """Return the clients that are like many others, and of the rest those that are too much like one or two others.

    The first are decoys, which are like a third of the others or more: they raise what is usual, so that colluders
    would not stand out. Two colluders are like one other each, more of them like two. A pair of honest clients may be
    alike by chance, so more is asked of pairs.
    """
    every = _largest_first(cosines)
    many = max(2, len(every) // 3)
    decoys = _above({k: values[:many][-1] for k, values in every.items()}, spreads)
    rest = _largest_first({pair: cosine for pair, cosine in cosines.items() if decoys.isdisjoint(pair)})
    one = _above({k: values[0] for k, values in rest.items()}, _TO_ONE * spreads)
    return decoys | one | _above({k: fmean(values[:2]) for k, values in rest.items()}, spreads, lower=True)


def _largest_first(cosines: Cosines) -> dict[int, list[float]]:
    """Return each client's cosines with the others, the largest first."""
    own: dict[int, list[float]] = {}
    for pair, cosine in cosines.items():
        for k in pair:
            own.setdefault(k, []).append(cosine)
    return {k: sorted(values, reverse=True) for k, values in own.items()}


def _above(values: Mapping[int, float], spreads: float, *, lower: bool = False) -> set[int]:
    """Return the clients whose value is an outlier: so many ``spreads``, and at least ``_LEAST``, above the median.

    A spread is the distance from the median to the farther quartile. With ``lower`` it is that to the lower one, which
    colluders cannot raise as long as they are fewer than half.
    """
    if len(values) < 4:
        return set()
    first, middle, third = quantiles(values.values(), n=4, method="inclusive")
    spread = middle - first if lower else max(middle - first, third - middle)
    limit = middle + max(spreads * spread, _LEAST) + _ROUNDING
    return {k for k, value in values.items() if value > limit}
