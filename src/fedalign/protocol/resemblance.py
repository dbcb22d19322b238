"""Free clients whose updates are too much alike: colluding attackers push the model in one direction of their own."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from fedalign.protocol.contributions import Verification, reputations, usual_limit
from fedalign.protocol.messages import Request, Resemble

ALIKE = "its update is too much like those of other free clients"


def measure_resemblance(verification: Verification) -> Generator[Request, Any, dict[int, float]]:
    """Return how much each client's update is like others': the mean of its two largest cosines with them.

    The cosines are those of the bounded updates less the priority clients' mean update. Honest clients have little in
    common there: their data differ. Attackers that want the same have more. All updates are brought to the same length
    first: else a long one would lose to the bounds what it shares with others.
    """
    clients, log = verification.probed, verification.log
    if len(clients) < 3:
        return {}
    usual = median(log.similarities[k].length for k in log.trained)
    mix = verification.mix(clients)
    cosines = yield Resemble(replace(mix, step={k: usual / log.similarities[k].length for k in clients}))
    return {k: sum(sorted(value for pair, value in cosines.items() if k in pair)[-2:]) / 2 for k in clients}


def too_much_alike(now: Mapping[int, float], before: Mapping[int, float], ratio: float) -> set[int]:
    """Return the clients whose resemblance is an outlier in this round, or was on average over the rounds.

    An outlier is at least ``ratio`` times the median as well. Where clients' data differ much, some honest updates are
    alike, and the limit rises with them.

    >>> alike = {1: 0.20, 2: 0.21, 3: 0.22, 4: 0.22, 5: 0.23, 6: 0.5, 7: 0.5}
    >>> sorted(too_much_alike(alike, {}, ratio=1.3))
    [6, 7]
    """
    average = {k: reputations(before, now)[k] for k in now}
    return {k for values in (now, average) for k, value in values.items() if value > _limit(values, ratio)}


def _limit(values: Mapping[int, float], ratio: float) -> float:
    return max(usual_limit(values), ratio * median(values.values())) if values else math.inf
