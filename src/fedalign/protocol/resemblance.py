"""Free clients whose updates are too much alike: colluding attackers push the model in one direction of their own."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import replace
from statistics import fmean, median, quantiles
from typing import Any

from fedalign.protocol.contributions import Verification, reputations
from fedalign.protocol.messages import Request, Resemble

ALIKE = "its update is too much like those of other free clients"
Cosines = Mapping[tuple[int, int], float]  #: of every two clients' updates

_TO_ONE = 1.5  # times as many spreads are asked of the resemblance to one client
_LEAST = 0.05  # above the median: by less, nobody is an outlier


def measure_resemblance(verification: Verification) -> Generator[Request, Any, dict[tuple[int, int], float]]:
    """Return how much every two clients' updates are alike: their cosine.

    The cosines are those of the bounded updates less the mean update of all clients. Honest clients have little in
    common there: their data differ. Attackers that want the same have more. All updates are brought to the same length
    first: else a long one would lose to the bounds what it shares with others.
    """
    clients, log = verification.probed, verification.log
    if len(clients) < 3:
        return {}
    usual = median(log.similarities[k].length for k in log.trained)
    mix = verification.mix(clients)
    cosines: Cosines = yield Resemble(replace(mix, step={k: usual / log.similarities[k].length for k in clients}))
    return dict(cosines)


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
    limit = middle + max(spreads * spread, _LEAST)
    return {k for k, value in values.items() if value > limit}
