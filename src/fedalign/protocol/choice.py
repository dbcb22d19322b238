"""The server's decision: average every candidate's clients, and let the priority clients choose among several."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from fedalign.errors import DivergedError, FedalignError
from fedalign.protocol.messages import Combine, Evaluate, Job, Request
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import Tried
from fedalign.protocol.roster import Roster
from fedalign.protocol.shares import shares_of, weighted
from fedalign.rules.rule import Candidate, Measure, Rule
from fedalign.training.participation import Presence
from fedalign.training.server import Branch


@dataclass(frozen=True)
class Mean:
    """Where the server moves by a mean of clients' models, their shares in it, and the judges' measures of the model.

    ``measures`` is None where nobody was asked.
    """

    branch: Branch
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
    in_base: Mapping[int, str] = field(default_factory=dict)  #: why somebody is in the base


def choose(
    plan: Plan,
    round: int,
    presence: Presence,
    candidates: Sequence[Candidate],
    base: Mapping[int, str] | None,
    sent: Sequence[int],
    judges: Sequence[int],
    before: Branch,
) -> Generator[Request, Any, Choice]:
    """Average every candidate's clients; of several, take the one that the rule chooses by the judges' measures.

    What they measure is what they would be served: the model ``before`` the round, moved by the mean as the server
    does. The next round starts from the mean over the priority clients and those of the ``base``, or from the choice.
    """
    rule, roster, server = plan.rule, plan.roster, plan.server
    _check(rule, candidates, base or (), {k for k in sent if not roster.priority[k]})
    priority = [k for k in sent if roster.priority[k]]
    mixes = [shares_of(roster, presence, sorted([*priority, *one.clients]), one) for one in candidates]
    steps = [one.step for one in candidates]
    if base is not None:
        own = shares_of(roster, presence, sorted([*priority, *base]))
        at = next((i for i, mix in enumerate(mixes) if mix == own and not steps[i]), len(mixes))
        if at == len(mixes):
            mixes, steps = [*mixes, own], [*steps, {}]
    combined = yield Combine(tuple(mixes), tuple(steps) if any(steps) else ())
    broken = frozenset(combined.not_finite)
    whole = [i for i in range(len(candidates)) if not broken & mixes[i].keys()]
    if not whole:  # a priority client's weights are not finite, or those of somebody in every candidate
        names = [roster.names[k] for k in sorted(broken)]
        raise DivergedError.at(round, names, "the trained weights are not finite")
    best = whole[0]
    jobs: tuple[Job, ...] = ()
    tried: tuple[Tried, ...] = ()
    measures: dict[int, dict[int, Measure]] = {}
    if len(candidates) > 1:
        moved = {i: before.step(combined.models[i], server).model for i in whole}
        jobs = tuple((moved[i], k) for i in whole for k in judges)
        answers = dict(zip([(i, k) for i in whole for k in judges], (yield Evaluate(jobs, plan.judge_on)), strict=True))
        # A judge that got lost on the way must not favour one candidate: those count that measured all.
        there = [k for k in judges if all(answers[i, k] is not None for i in whole)]
        measures = {i: {k: answers[i, k] for k in there} for i in whole}
        best, tried = _best(rule, roster, candidates, whole, measures)
    alone = next((i for i in whole if not candidates[i].clients), None)
    start = at if base is not None and not broken & mixes[at].keys() else best
    # The optimiser's memory, as large as the model or twice that, is kept for these alone.
    means = {
        i: Mean(before.step(combined.models[i], server), mixes[i], measures.get(i))
        for i in {best, start, alone}
        if i is not None
    }
    return Choice(
        means[best],
        means[start],
        None if alone is None else means[alone],
        candidates[best].epsilon,
        tried,
        len(jobs),
        broken,
        candidates[best].reasons,
        base or {},
    )


def _check(rule: Rule, candidates: Sequence[Candidate], base: Iterable[int], offering: Set[int]) -> None:
    """Refuse what a rule of somebody's own may get wrong."""
    name = type(rule).__name__
    if not candidates:
        raise FedalignError(f"{name} gave no candidate; candidates are sets of the free clients that offer")
    for k in (*(k for one in candidates for k in one.clients), *base):
        if k not in offering:
            raise FedalignError(
                f"{name} names client {k}, which offered nothing; candidates are sets of the free clients that offer"
            )
    for one in candidates:
        for k in one.weight:
            if k not in one.clients:
                raise FedalignError(f"{name} gives a weight to client {k}, which is not in that candidate")


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
    finite = {i: loss for i, loss in losses.items() if math.isfinite(loss)}
    tried = tuple(Tried(one.epsilon, len(one.clients), finite.get(i), i == best) for i, one in enumerate(candidates))
    return best, tried
