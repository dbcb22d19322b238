"""The server's decision: average every candidate's clients, and let the priority clients choose among several."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedalign.errors import DivergedError, FedalignError
from fedalign.history import Tried
from fedalign.messages import Combine, Evaluate, Job, Model, Request
from fedalign.participation import Presence
from fedalign.roster import Roster
from fedalign.rules import Candidate, Measure, Rule, Split
from fedalign.shares import shares_of, weighted


@dataclass(frozen=True)
class Mean:
    """A mean of clients' models, their shares in it, and the judges' measures of it (None: nobody was asked)."""

    model: Model
    shares: Mapping[int, float]
    measures: Mapping[int, Measure] | None = None


@dataclass(frozen=True)
class Choice:
    """What a round serves, what the next one starts from, and how that came to be."""

    served: Mean
    base: Mean  #: the same object as ``served`` where they don't differ
    alone: Mean | None  #: the priority clients' own, where that was a candidate
    epsilon: float | None
    tried: tuple[Tried, ...] = ()
    models_down: int = 0  #: candidates that judges were sent
    broken: frozenset[int] = frozenset()  #: free clients whose weights are not finite
    reasons: Mapping[int, str] = field(default_factory=dict)


def choose(
    rule: Rule,
    candidates: Sequence[Candidate],
    base: Mapping[int, str] | None,
    round: int,
    roster: Roster,
    presence: Presence,
    sent: Sequence[int],
    judges: Sequence[int],
    split: Split,
) -> Generator[Request, Any, Choice]:
    """Average every candidate's clients; of several, take the one that the rule chooses by the judges' measures.

    The next round starts from the mean over the priority clients and those of the ``base``, or from the choice.
    """
    offering = {k for k in sent if not roster.priority[k]}
    strangers = [k for one in (*(c.clients for c in candidates), base or ()) for k in one if k not in offering]
    if not candidates or strangers:
        what = f"names client {strangers[0]}, which offered nothing" if strangers else "gave no candidate"
        raise FedalignError(f"{type(rule).__name__} {what}; candidates are sets of the free clients that offer")
    priority = [k for k in sent if roster.priority[k]]
    shares = [shares_of(roster, presence, sorted([*priority, *one.clients]), one) for one in candidates]
    mixes = [
        {k: share * one.step.get(k, 1.0) for k, share in mine.items()}
        for mine, one in zip(shares, candidates, strict=True)
    ]
    if base is not None:
        own = shares_of(roster, presence, sorted([*priority, *base]))
        at = next((i for i, mix in enumerate(mixes) if mix == own), len(mixes))
        if at == len(mixes):
            mixes, shares = [*mixes, own], [*shares, own]
    combined = yield Combine(tuple(mixes))
    broken = frozenset(combined.not_finite)
    whole = [i for i in range(len(candidates)) if not broken & mixes[i].keys()]
    if not whole:  # a priority client's weights are not finite, or those of somebody in every candidate
        names = [roster.names[k] for k in sorted(broken)]
        raise DivergedError.at(round, names, "the trained weights are not finite")
    means = [Mean(model, mine) for model, mine in zip(combined.models, shares, strict=True)]
    best = whole[0]
    jobs: tuple[Job, ...] = ()
    tried: tuple[Tried, ...] = ()
    if len(candidates) > 1:
        jobs = tuple((combined.models[i], k) for i in whole for k in judges)
        answers = dict(zip([(i, k) for i in whole for k in judges], (yield Evaluate(jobs, split)), strict=True))
        # A judge that got lost on the way must not favour one candidate: those count that measured all.
        there = [k for k in judges if all(answers[i, k] is not None for i in whole)]
        for i in whole:
            means[i] = Mean(combined.models[i], shares[i], {k: answers[i, k] for k in there})
        best, tried = _best(rule, roster, candidates, whole, {i: means[i].measures or {} for i in whole})
    alone = next((i for i in whole if not candidates[i].clients), None)
    return Choice(
        means[best],
        means[at] if base is not None and not broken & mixes[at].keys() else means[best],
        None if alone is None else means[alone],
        candidates[best].epsilon,
        tried,
        len(jobs),
        broken,
        candidates[best].reasons,
    )


def _best(
    rule: Rule,
    roster: Roster,
    candidates: Sequence[Candidate],
    whole: Sequence[int],
    measures: Mapping[int, Mapping[int, Measure]],
) -> tuple[int, tuple[Tried, ...]]:
    """Take the candidate that the rule chooses by the measures (without any, the smallest); tell all their losses."""
    losses = {i: weighted(roster, measures[i])[0] if measures[i] else math.inf for i in whole}
    usable = [i for i in whole if math.isfinite(losses[i])]
    if usable:
        p = {k: float(roster.p[k]) for k in measures[usable[0]]}
        best = usable[rule.choose([candidates[i] for i in usable], [measures[i] for i in usable], p)]
    else:
        best = min(whole, key=lambda i: len(candidates[i].clients))
    tried = tuple(
        Tried(one.epsilon, len(one.clients), losses[i] if math.isfinite(losses.get(i, math.inf)) else None)
        for i, one in enumerate(candidates)
    )
    return best, tried
