"""Free clients whose updates are too much alike: colluding attackers push the model in one direction of their own."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import replace
from statistics import fmean, median, quantiles
from typing import Any

from fedalign.protocol.contributions import Verification, reputations, usual_limit
from fedalign.protocol.messages import Request, Resemble

ALIKE = "its update is too much like those of other free clients"
Cosines = Mapping[tuple[int, int], float]  #: of every two clients' updates

_TO_MANY = 3.0  # distances from the median to the farther quartile: where resemblance to many others is an outlier
_TO_ONE = 5.0  # the same for the resemblance to the one client that is most like it


def measure_resemblance(verification: Verification) -> Generator[Request, Any, dict[tuple[int, int], float]]:
    """Return how much every two clients' updates are alike: their cosine.

    The cosines are those of the bounded updates less the priority clients' mean update. Honest clients have little in
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


def too_much_alike(now: Cosines, before: Cosines, ratio: float) -> set[int]:
    """Return the clients that are outliers by their resemblance in this round, or by its average over the rounds.

    An outlier is at least ``ratio`` times as much like others as the median client as well; infinity lets all take
    part. Where clients' data differ
    much, some honest updates are alike, and the limit rises with them.

    >>> alike = {(i, j): 0.2 for i in range(6) for j in range(i)}
    >>> sorted(too_much_alike({**alike, (5, 4): 0.5}, {}, ratio=1.3))
    [4, 5]
    """
    if math.isinf(ratio):
        return set()
    average = reputations(before, now)
    return _outliers(now, ratio) | _outliers({pair: average[pair] for pair in now}, ratio)


def _outliers(cosines: Cosines, ratio: float) -> set[int]:
    """Return the clients that are like many others, and of the rest those that are too much like one or two others.

    The first are decoys, which are like half of the others: they raise what is usual, so that colluders would not stand
    out. Two colluders are like one other each, more of them like two. A pair of honest clients may be alike by chance,
    so more is asked of pairs.
    """
    clients = {k for pair in cosines for k in pair}
    decoys = _above(_mean_of_largest(cosines, max(2, len(clients) // 2)), ratio, _TO_MANY)
    rest = {pair: cosine for pair, cosine in cosines.items() if decoys.isdisjoint(pair)}
    pairs = _above(_mean_of_largest(rest, 1), ratio, _TO_ONE)
    return decoys | pairs | _above(_mean_of_largest(rest, 2), ratio)


def _mean_of_largest(cosines: Cosines, most: int) -> dict[int, float]:
    """Return, for each client, the mean of its ``most`` largest cosines."""
    own: dict[int, list[float]] = {}
    for pair, cosine in cosines.items():
        for k in pair:
            own.setdefault(k, []).append(cosine)
    return {k: fmean(sorted(values, reverse=True)[:most]) for k, values in own.items()}


def _above(values: Mapping[int, float], ratio: float, spreads: float | None = None) -> set[int]:
    """Return the clients whose value is an outlier, by ``spreads`` or else as contributions are (``usual_limit``)."""
    if len(values) < 4:
        return set()
    if spreads is None:
        limit = usual_limit(values)
    else:
        lower, middle, upper = quantiles(values.values(), n=4, method="inclusive")
        limit = middle + spreads * max(middle - lower, upper - middle)
    limit = max(limit, ratio * median(values.values()))
    return {k for k, value in values.items() if value > limit}
