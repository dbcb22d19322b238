"""By how much the served model may be worse than the priority clients' own: a bound for every round, and an alarm.

In round t both models classify the priority clients' held-out samples. A sample is **lost** if only the own model is
right, and **gained** if only the served one is. ``D_t = P(lost) − P(gained)`` says by how much accuracy the served
model is worse on new samples. It all rests on one e-value (its mean is at most 1 if a hypothesis holds):
``Π (1 + λ(m − z_i))`` with ``z_i`` = 1, −1, 0 for a lost, a gained and another sample, and ``λ ≥ 0`` small enough for
the factors to be positive. Its mean is at most 1 if ``D ≥ m``, also if samples come from different clients with
different distributions. docs/research/promise.md has the statements, the proofs and the check by simulation.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import Any

from fedalign.errors import FedalignError
from fedalign.protocol.messages import Model, Outcomes, Paired, Request
from fedalign.protocol.records import Promise
from fedalign.rules.rule import Split

_STEP = 1.5  # ratio of neighbouring stakes: finer ones cost as much by their number as they gain
_MOST = 1e12  # more evidence than that says nothing more


def compare_served(
    round: int, before: Promise, served: Model, own: Model, clients: tuple[int, ...], split: Split, *,
    choices: int = 1, lasting: int = 1, rounds: int | None = None,
) -> Generator[Request, Any, Promise]:  # fmt: skip
    """Let clients compare the served model with their own, and return the round's promise.

    ``before`` is the promise of the last round (``Promise()`` in a new run), whose ``alpha`` and ``delta`` are kept.
    ``choices`` counts the models of this round that could have been served, whatever these samples say; ``lasting``
    counts the outcomes of decisions that look at these samples and that later rounds build on. ``rounds`` is the
    number of rounds of the run, if it is known. Pass one object as both models where the own model is served: the
    promise is then exact. Where no client answers, or the task has no classes, ``worse_by`` is None.
    """
    log_lasting = before.log_lasting + math.log(_positive("lasting", lasting))
    log_choices = log_lasting + math.log(_positive("choices", choices))
    before = replace(before, log_lasting=log_lasting)
    if served is own:
        return replace(
            before, gained=0.0, lost=0.0, samples=0, worse_by=0.0, strict=0.0, chance=0.0, log_choices=log_choices
        )
    replies: dict[int, Outcomes] = yield Paired((served, own), clients, split)
    return promise(round, before, total(replies.values()), log_choices, rounds)


def promise(
    round: int, before: Promise, outcomes: Outcomes, log_choices: float = 0.0, rounds: int | None = None
) -> Promise:
    """Return the promise of a round from the outcomes of all clients together.

    ``log_choices`` is the logarithm of the number of models that could have been served in this round, had these
    samples been others. Without samples, ``worse_by`` is None.

    >>> made = promise(0, Promise(), Outcomes(gained=12, lost=4, samples=1000), rounds=40)
    >>> round(made.worse_by, 3), made.alarm
    (0.01, False)
    """
    gained, lost, samples = outcomes.gained, outcomes.lost, outcomes.samples
    made = replace(before, gained=gained, lost=lost, samples=samples, log_choices=log_choices)
    if not samples:
        return replace(made, worse_by=None, strict=None, chance=None)
    weight = round_weight(round, rounds)
    needed = -math.log(before.alpha * weight)
    found = log_evidence(lost, gained, samples, before.delta)
    return replace(
        made,
        worse_by=upper_bound(gained, lost, samples, needed),
        strict=upper_bound(gained, lost, samples, needed + log_choices),
        chance=chance_worse(outcomes, before.delta, log_choices - math.log(weight)),
        evidence=min(_MOST, before.evidence + weight * math.exp(min(found, 700.0))),
    )


def upper_bound(gained: float, lost: float, samples: int, nats: float) -> float:
    """Return an upper bound on D that is wrong with probability at most exp(−nats).

    >>> round(upper_bound(gained=0, lost=0, samples=1000, nats=math.log(20)), 4)
    0.0047
    """
    _check(gained, lost, samples)
    low, high = -1.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if _log_e_value(lost, gained, samples, middle) >= nats:
            high = middle
        else:
            low = middle
    return high


def log_evidence(lost: float, gained: float, samples: int, delta: float) -> float:
    """Return the logarithm of an e-value against "the served model is not worse by more than delta".

    >>> log_evidence(lost=40, gained=5, samples=500, delta=0.01) > math.log(20)
    True
    """
    _check(gained, lost, samples)
    return _log_e_value(gained, lost, samples, -_fraction("delta", delta))


def chance_worse(outcomes: Outcomes, delta: float, nats: float = 0.0) -> float:
    """Return a p-value of "the served model is worse by more than delta": if it is, values of at most p have chance p.

    A negative delta asks whether the served model is better. ``nats`` is what looking at several rounds and choosing
    costs: ``−log(round_weight(t, T))``, plus ``log_choices``.

    >>> chance_worse(Outcomes(gained=12, lost=4, samples=1000), delta=0.01) < 0.005
    True
    """
    _check(outcomes.gained, outcomes.lost, outcomes.samples)
    if not -1 < delta < 1:
        raise FedalignError(f"delta must be above -1 and below 1, not {delta!r}")
    found = _log_e_value(outcomes.lost, outcomes.gained, outcomes.samples, delta)
    return min(1.0, math.exp(min(0.0, nats - found)))


def round_weight(round: int, rounds: int | None = None) -> float:
    """Return the part of alpha that a round may spend; all parts together are at most 1.

    Every round gets the same part if their number is known, else ``1/((t+1)(t+2))``.

    >>> round_weight(3, rounds=40), round_weight(3)
    (0.025, 0.05)
    """
    return 1 / ((round + 1) * (round + 2)) if rounds is None else 1 / _positive("rounds", rounds)


def samples_needed(
    delta: float, alpha: float = 0.05, disagreement: float = 0.1, rounds: int = 1, log_choices: float = 0.0
) -> int:
    """Return how many held-out samples bring the bound to delta, for models that are equally good.

    ``disagreement`` is the part of samples that only one of the two models classifies correctly.

    >>> samples_needed(0.02, disagreement=0.05, rounds=40)
    2263
    """
    if not 0 < delta < 1:
        raise FedalignError(f"delta must be above 0 and below 1, not {delta!r}")
    if not 0 < alpha < 1:
        raise FedalignError(f"alpha must be above 0 and below 1, not {alpha!r}")
    half = _fraction("disagreement", disagreement) / 2
    nats = -math.log(alpha * round_weight(0, rounds)) + log_choices

    def enough(samples: int) -> bool:
        return _log_e_value(half * samples, half * samples, samples, delta) >= nats

    high = 1
    while not enough(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def total(outcomes: Iterable[Outcomes]) -> Outcomes:
    """Add up the outcomes of several clients.

    >>> total([Outcomes(1, 2, 10), Outcomes(0, 1, 30)])
    Outcomes(gained=1, lost=3, samples=40)
    """
    every = list(outcomes)
    return Outcomes(sum(o.gained for o in every), sum(o.lost for o in every), sum(o.samples for o in every))


def _log_e_value(ones: float, minus_ones: float, samples: int, m: float) -> float:
    """Return the logarithm of an e-value for "the mean of z is at least m", averaged over stakes ``λ = c/(1 − m)``.

    The stakes c go from 1 down to about 2/√n, without a look at the data: each is best for another variance. Every
    factor grows with m, so the e-value does too.
    """
    if m >= 1:
        return math.inf if ones < samples else 0.0
    if m <= -1:
        return 0.0
    zeros = samples - ones - minus_ones
    stakes = [1.0]
    while stakes[-1] > 2 / math.sqrt(samples):
        stakes.append(stakes[-1] / _STEP)
    logs = [
        (ones * math.log1p(-c) if ones and c < 1 else -math.inf if ones else 0.0)
        + minus_ones * math.log1p(c * (1 + m) / (1 - m))
        + zeros * math.log1p(c * m / (1 - m))
        for c in stakes
    ]
    top = max(logs)
    return top + math.log(math.fsum(math.exp(one - top) for one in logs) / len(stakes)) if top > -math.inf else top


def _check(gained: float, lost: float, samples: int) -> None:
    if not (samples >= 1 and gained >= 0 and lost >= 0 and gained + lost <= samples + 1e-6):
        raise FedalignError(
            f"gained and lost must be at least 0 and together at most samples, not {gained}, {lost} and {samples}"
        )


def _fraction(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise FedalignError(f"{name} must be at least 0 and below 1, not {value!r}")
    return value


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise FedalignError(f"{name} must be at least 1, not {value!r}")
    return value
