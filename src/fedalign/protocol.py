"""One round of prioritized federated learning after another, as a generator that does no I/O.

It yields requests and is sent replies (``messages.py``); whoever drives it (the simulator, a Flower server) does the
work. So this module reads like the algorithm (Ravi and Shomorony, 2023), and ten lines of made-up replies test it::

    Evaluate  -> one Measure (or None: lost) per job
    Train     -> one Update, Declined or Lost per job
    Compare   -> the Similarity of every update that the last Train brought, by client
    Combine   -> Combined: weighted means of what the clients of the last Train sent
    RoundDone -> nothing; the driver may store the record and the model

Models are opaque here: anything that can be scaled by a number and added (torch tensors, NumPy arrays, floats).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedalign.errors import DivergedError, FedalignError
from fedalign.history import ClientRound, Decision, History, RoundRecord, Tried
from fedalign.messages import (
    Combine,
    Compare,
    Declined,
    Evaluate,
    Job,
    Lost,
    Model,
    Reply,
    Request,
    Result,
    RoundDone,
    Run,
    Train,
    Update,
)
from fedalign.participation import Full, Participation, Presence
from fedalign.roster import Roster
from fedalign.rules import Broadcast, Candidate, Measure, Rule, Split
from fedalign.server import ServerOptimizer


@dataclass(frozen=True)
class Plan:
    """Everything a run's decisions depend on."""

    roster: Roster
    rule: Rule
    rounds: int
    warmup: int = 0  #: the first so many rounds are for priority clients only
    participation: Participation = Full()
    seed: int = 0
    match_on: Split = "heldout"
    has_test: bool = True
    measure_training: bool = True  #: also measure every aggregate on the priority clients' training data
    server: ServerOptimizer | None = None  #: None: take the mean, as FedAvg does
    work: tuple[int, ...] = ()  #: the samples, passes included, that each client trains on in a round; for the record


def warmup_rounds(warmup: float, rounds: int) -> int:
    """Read a warm-up given as a fraction of the rounds (a float up to 1.0) or as a number of rounds.

    >>> warmup_rounds(0.1, 200), warmup_rounds(5, 200)
    (20, 5)
    """
    number = isinstance(warmup, numbers.Real) and not isinstance(warmup, bool)
    if not number or not 0 <= warmup < math.inf:
        raise FedalignError(f"warmup must be a fraction of the rounds or a number of rounds, not {warmup!r}")
    if not isinstance(warmup, numbers.Integral) and warmup <= 1:
        return math.floor(warmup * rounds + 0.5)
    if warmup != int(warmup) or warmup > rounds:
        raise FedalignError(f"warmup must be a fraction up to 1.0 or 0 to {rounds} whole rounds, not {warmup}")
    return int(warmup)


def federated(plan: Plan, model: Model, start: int = 0, memory: tuple[Model, ...] = ()) -> Run:
    """Run prioritized federated learning from round ``start`` with ``model`` (and the server optimiser's memory)."""
    history = History()
    for round in range(start, plan.rounds):
        model, record, memory = yield from _round(plan, round, model, memory)
        yield RoundDone(record, model, memory)
        history.rounds.append(record)
    return Result(model, history)


def alone(plan: Plan, models: Sequence[Model], start: int = 0) -> Run:
    """Let every client train its own model, with no server: what a client has without the federation."""
    roster, history, models = plan.roster, History(), list(models)
    everybody = tuple(range(len(roster)))
    for round in range(start, plan.rounds):
        measures = yield Evaluate(tuple(zip(models, everybody, strict=True)), plan.match_on)
        replies = yield Train(tuple(zip(models, everybody, strict=True)), round)
        own = dict(zip(everybody, measures, strict=True))
        _stop_if_diverged(roster, round, [k for k, reply in zip(everybody, replies, strict=True) if not reply.finite])
        models = [reply.model for reply in replies]
        priority = [k for k in everybody if roster.priority[k]]
        loss, accuracy = _weighted(roster, {k: own[k] for k in priority})
        scores = yield from _scores(plan, [(models[k], k) for k in priority])
        clients = tuple(
            ClientRound(
                k,
                name,
                roster.priority[k],
                True,
                own[k].loss,
                own[k].accuracy,
                "trained",
                0.0,
                "alone, no server",
            )
            for k, name in enumerate(roster.names)
        )
        record = RoundRecord(round, None, loss, accuracy, *scores, False, None, 0, 0, clients, sum(plan.work))
        yield RoundDone(record, tuple(models))
        history.rounds.append(record)
    return Result(tuple(models), history)


def _round(
    plan: Plan, round: int, model: Model, memory: tuple[Model, ...]
) -> Generator[Request, Any, tuple[Model, RoundRecord, tuple[Model, ...]]]:
    roster, rule = plan.roster, plan.rule
    presence = plan.participation.draw(round, roster, plan.seed)
    warmup = round < plan.warmup
    epsilon = rule.epsilon_at(round, plan.rounds)
    invite = rule.invites_free and not warmup
    priority = [k for k in range(len(roster)) if presence.reachable[k] and roster.priority[k]]
    free = [k for k in range(len(roster)) if presence.reachable[k] and not roster.priority[k] and invite]

    # F(w): the priority clients' own evaluations of w.
    measures = (yield Evaluate(tuple((model, k) for k in priority), plan.match_on)) if priority else []
    own: dict[int, Measure] = {k: m for k, m in zip(priority, measures, strict=True) if m is not None}
    asked = tuple(own)
    skipped: str | None = None
    loss = accuracy = None
    replies: dict[int, Reply] = {}
    shares: Mapping[int, float] = {}
    choice: _Choice | None = None
    if not own:
        skipped = "no priority client answered" if priority else "no priority client was reachable"
    else:
        loss, accuracy = _weighted(roster, own)
        if not math.isfinite(loss):
            bad = [roster.names[k] for k, m in own.items() if not math.isfinite(m.loss)]
            raise _diverged(round, bad, "the model's loss is not finite")
        # Broadcast, the free clients' offers, and local work.
        broadcast = Broadcast(round, loss, accuracy, epsilon)
        invited = sorted([*own, *free])
        answers = yield Train(tuple((model, k) for k in invited), round, broadcast, rule, plan.match_on)
        replies = dict(zip(invited, answers, strict=True))
        own |= {k: reply.own for k, reply in replies.items() if not isinstance(reply, Lost) and reply.own is not None}
        # The server's decision, then the mean over those it admits.
        sent = [k for k, reply in replies.items() if isinstance(reply, Update)]
        if any(roster.priority[k] for k in sent):
            offers = {k: own[k] for k in sent if not roster.priority[k]}
            if rule.needs_updates:
                reference = _shares(roster, presence, [k for k in sent if roster.priority[k]])
                similar = yield Compare(reference, tuple(sent))
                candidates = rule.compare(offers, similar, broadcast)
            else:
                candidates = rule.candidates(offers, broadcast)
            choice = yield from _choose(plan, round, presence, sent, candidates, list(asked))
            shares, epsilon = choice.shares, choice.epsilon
            if plan.server is None:
                model = choice.model
            else:
                model, memory = plan.server.step(model, choice.model, memory)
            broadcast = replace(broadcast, epsilon=epsilon)
        else:
            skipped = "no priority client sent an update"

    def record_of(k: int, name: str) -> ClientRound:
        decision, reason = _decision(plan, k, presence, warmup, replies.get(k), k in shares, skipped)
        measure = own.get(k)
        if choice is not None and k in choice.broken:
            reason = "its trained weights are not finite"
        elif choice is not None and isinstance(replies.get(k), Update):
            reason = reason or choice.reasons.get(k, "")
        if not reason and measure is not None:
            reason = rule.why(measure, broadcast, decision == "admitted")
        return ClientRound(
            k,
            name,
            roster.priority[k],
            presence.reachable[k],
            measure.loss if measure else None,
            measure.accuracy if measure else None,
            decision,
            shares.get(k, 0.0),
            reason,
        )

    clients = tuple(record_of(k, name) for k, name in enumerate(roster.names))
    scores = yield from _scores(plan, [(model, k) for k in range(len(roster)) if roster.priority[k]])
    sent = [k for k, reply in replies.items() if isinstance(reply, Update)]
    down = len(replies) + (choice.models_down if choice else 0)
    samples = sum(plan.work[k] for k in sent) if plan.work else 0
    tried = choice.tried if choice else ()
    record = RoundRecord(
        round, epsilon, loss, accuracy, *scores, warmup, skipped, down, len(sent), clients, samples, tried
    )
    return model, record, memory


@dataclass(frozen=True)
class _Choice:
    """The round's new model, its clients' shares, and how it came to be chosen."""

    model: Model
    shares: Mapping[int, float]
    epsilon: float | None
    tried: tuple[Tried, ...] = ()
    models_down: int = 0  # candidates that priority clients were sent
    broken: frozenset[int] = frozenset()  # free clients whose weights are not finite
    reasons: Mapping[int, str] = field(default_factory=dict)


def _choose(
    plan: Plan,
    round: int,
    presence: Presence,
    sent: Sequence[int],
    candidates: Sequence[Candidate],
    judges: Sequence[int],
) -> Generator[Request, Any, _Choice]:
    """Average every candidate's clients; of several, take the one with the lowest loss on the judges' data."""
    roster = plan.roster
    offering = {k for k in sent if not roster.priority[k]}
    strangers = [k for one in candidates for k in one.clients if k not in offering]
    if not candidates or strangers:
        what = f"names client {strangers[0]}, which offered nothing" if strangers else "gave no candidate"
        raise FedalignError(f"{type(plan.rule).__name__} {what}; candidates are sets of the free clients that offer")
    priority = [k for k in sent if roster.priority[k]]
    shares = [_shares(roster, presence, sorted([*priority, *one.clients]), one) for one in candidates]
    mixes = tuple(
        {k: share * one.step.get(k, 1.0) for k, share in mine.items()}
        for mine, one in zip(shares, candidates, strict=True)
    )
    combined = yield Combine(mixes)
    broken = frozenset(combined.not_finite)
    whole = [i for i, mix in enumerate(mixes) if not broken & mix.keys()]
    if not whole:  # a priority client's weights are not finite, or those of somebody in every candidate
        _stop_if_diverged(roster, round, sorted(broken))
    if len(candidates) == 1:
        return _Choice(combined.models[0], shares[0], candidates[0].epsilon, reasons=candidates[0].reasons)
    jobs = tuple((combined.models[i], k) for i in whole for k in judges)
    answers = dict(zip([(i, k) for i in whole for k in judges], (yield Evaluate(jobs, plan.match_on)), strict=True))
    # A judge that got lost on the way must not favour one candidate: those count that measured all.
    there = [k for k in judges if all(answers[i, k] is not None for i in whole)]
    losses = {i: _weighted(roster, {k: answers[i, k] for k in there})[0] if there else math.inf for i in whole}
    losses = {i: loss if math.isfinite(loss) else math.inf for i, loss in losses.items()}
    best = min(whole, key=lambda i: (losses[i], len(candidates[i].clients)))
    tried = tuple(
        Tried(one.epsilon, len(one.clients), losses[i] if math.isfinite(losses.get(i, math.inf)) else None)
        for i, one in enumerate(candidates)
    )
    taken = candidates[best]
    return _Choice(combined.models[best], shares[best], taken.epsilon, tried, len(jobs), broken, taken.reasons)


def _shares(
    roster: Roster, presence: Presence, admitted: Sequence[int], candidate: Candidate | None = None
) -> dict[int, float]:
    """Give each admitted client its normalised weight: ``p_k``, or ``c_k/K`` for one drawn ``c_k`` times of ``K``."""
    draws = presence.draws
    total_draws = sum(draws.values()) if draws else 0
    weights = {k: draws[k] / total_draws if draws and roster.priority[k] else float(roster.p[k]) for k in admitted}
    if candidate is not None and (candidate.weight or candidate.scale):
        # Weights beside the priority clients' 1, of which only those that are here have a part.
        here = math.fsum(weights[k] for k in admitted if roster.priority[k])
        weights |= {k: weight * here for k, weight in candidate.weight.items()}
        weights = {k: weight * candidate.scale.get(k, 1.0) for k, weight in weights.items()}
    total = math.fsum(weights.values())
    return {k: weight / total for k, weight in weights.items()}


def _decision(
    plan: Plan,
    k: int,
    presence: Presence,
    warmup: bool,
    reply: Reply | None,
    included: bool,
    skipped: str | None,
) -> tuple[Decision, str]:
    """Name what happened to a client, and why; an empty reason is the rule's to give."""
    is_priority = plan.roster.priority[k]
    if not presence.reachable[k]:
        return "absent", "not reachable"
    if reply is None:
        if is_priority:
            return "lost", "did not answer the evaluation"
        if warmup:
            return "absent", "warm-up: priority clients only"
        return "absent", "not invited by the rule" if not plan.rule.invites_free else (skipped or "not invited")
    if isinstance(reply, Lost):
        return "lost", reply.reason
    if isinstance(reply, Declined):
        return "declined", ""
    if is_priority:
        return "trained", "priority"
    return ("admitted", "") if included else ("refused", skipped or "")


def _scores(plan: Plan, jobs: list[Job]) -> Generator[Request, Any, tuple[float | None, float | None, float | None]]:
    """Give test accuracy, test loss and training loss of what the priority clients now have."""

    def measure(split: Split) -> Generator[Request, Any, tuple[float | None, float | None]]:
        measures = yield Evaluate(tuple(jobs), split)
        there = {k: m for (_, k), m in zip(jobs, measures, strict=True) if m is not None and m.samples}
        return _weighted(plan.roster, there) if there else (None, None)

    test_loss, test_accuracy = (yield from measure("test")) if plan.has_test else (None, None)
    train_loss, _ = (yield from measure("train")) if plan.measure_training else (None, None)
    return test_accuracy, test_loss, train_loss


def _weighted(roster: Roster, own: dict[int, Measure]) -> tuple[float, float | None]:
    """Average measures with weights ``p_k`` over the clients that are there."""
    total = math.fsum(float(roster.p[k]) for k in own)
    loss = math.fsum(float(roster.p[k]) * m.loss for k, m in own.items()) / total
    accuracies = [(float(roster.p[k]), m.accuracy) for k, m in own.items() if m.accuracy is not None]
    if len(accuracies) < len(own):
        return loss, None
    return loss, math.fsum(p * a for p, a in accuracies) / total


def _stop_if_diverged(roster: Roster, round: int, not_finite: Sequence[int]) -> None:
    if not_finite:
        raise _diverged(round, [roster.names[k] for k in not_finite], "the trained weights are not finite")


def _diverged(round: int, names: list[str], what: str) -> DivergedError:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return DivergedError(
        f"training diverged in round {round} at client(s) {shown}: {what}; try a smaller lr, or clip",
        round,
        tuple(names),
    )
