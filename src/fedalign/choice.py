"""The server's decision: average every candidate's clients, and let the priority clients choose among several."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedalign.errors import DivergedError, FedalignError
from fedalign.history import Tried
from fedalign.messages import Combine, Evaluate, Model, Request
from fedalign.participation import Presence
from fedalign.roster import Roster
from fedalign.rules import Candidate, Measure, Rule, Split
from fedalign.shares import shares_of, weighted


@dataclass(frozen=True)
class Choice:
    """A round's aggregate, its clients' shares, and how it came to be chosen."""

    model: Model
    shares: Mapping[int, float]
    epsilon: float | None
    tried: tuple[Tried, ...] = ()
    models_down: int = 0  #: candidates that priority clients were sent
    broken: frozenset[int] = frozenset()  #: free clients whose weights are not finite
    reasons: Mapping[int, str] = field(default_factory=dict)
    measures: Mapping[int, Measure] | None = None  #: the judges', of the model; None: nobody was asked
    alone: Choice | None = None  #: the priority clients' own aggregate, where that was another candidate


def choose(
    rule: Rule,
    candidates: Sequence[Candidate],
    round: int,
    roster: Roster,
    presence: Presence,
    sent: Sequence[int],
    judges: Sequence[int],
    split: Split,
) -> Generator[Request, Any, Choice]:
    """Average every candidate's clients; of several, take the one that the rule chooses by the judges' measures."""
    offering = {k for k in sent if not roster.priority[k]}
    strangers = [k for one in candidates for k in one.clients if k not in offering]
    if not candidates or strangers:
        what = f"names client {strangers[0]}, which offered nothing" if strangers else "gave no candidate"
        raise FedalignError(f"{type(rule).__name__} {what}; candidates are sets of the free clients that offer")
    priority = [k for k in sent if roster.priority[k]]
    shares = [shares_of(roster, presence, sorted([*priority, *one.clients]), one) for one in candidates]
    mixes = tuple(
        {k: share * one.step.get(k, 1.0) for k, share in mine.items()}
        for mine, one in zip(shares, candidates, strict=True)
    )
    combined = yield Combine(mixes)
    broken = frozenset(combined.not_finite)
    whole = [i for i, mix in enumerate(mixes) if not broken & mix.keys()]
    if not whole:  # a priority client's weights are not finite, or those of somebody in every candidate
        names = [roster.names[k] for k in sorted(broken)]
        raise DivergedError.at(round, names, "the trained weights are not finite")
    if len(candidates) == 1:
        return Choice(combined.models[0], shares[0], candidates[0].epsilon, reasons=candidates[0].reasons)
    jobs = tuple((combined.models[i], k) for i in whole for k in judges)
    answers = dict(zip([(i, k) for i in whole for k in judges], (yield Evaluate(jobs, split)), strict=True))
    # A judge that got lost on the way must not favour one candidate: those count that measured all.
    there = [k for k in judges if all(answers[i, k] is not None for i in whole)]
    measures = {i: {k: answers[i, k] for k in there} for i in whole}
    losses = {i: weighted(roster, measures[i])[0] if there else math.inf for i in whole}
    usable = [i for i in whole if math.isfinite(losses[i])]
    if usable:
        p = {k: float(roster.p[k]) for k in there}
        best = usable[rule.choose([candidates[i] for i in usable], [measures[i] for i in usable], p)]
    else:
        best = min(whole, key=lambda i: len(candidates[i].clients))
    tried = tuple(
        Tried(one.epsilon, len(one.clients), losses[i] if math.isfinite(losses.get(i, math.inf)) else None)
        for i, one in enumerate(candidates)
    )

    def made(i: int, alone: Choice | None = None) -> Choice:
        one = candidates[i]
        return Choice(
            combined.models[i], shares[i], one.epsilon, tried, len(jobs), broken, one.reasons, measures[i], alone
        )

    empty = next((i for i in whole if not candidates[i].clients), None)
    return made(best, made(empty) if empty is not None and empty != best else None)
