"""One round of prioritized federated learning after another, as a generator that does no I/O.

It yields requests and is sent replies (``messages.py``); whoever drives it (the simulator, a Flower server) does the
work. So this module reads like the algorithm (Ravi and Shomorony, 2023), and ten lines of made-up replies test it::

    Evaluate  -> one Measure (or None: lost) per job
    Train     -> one Update, Declined, Rejected or Lost per job
    Compare   -> the Similarity of every update that the last Train brought, by client
    Combine   -> Combined: weighted means of what the clients of the last Train sent
    RoundDone -> nothing; the driver may store the record and the model

Models are opaque here: anything that can be scaled by a number and added (torch tensors, NumPy arrays, floats).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedalign.errors import DivergedError
from fedalign.protocol.choice import Choice, choose
from fedalign.protocol.decisions import client_rounds
from fedalign.protocol.fallback import measure, settle
from fedalign.protocol.messages import (
    Compare,
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
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import ClientRound, Fallback, History, RoundRecord
from fedalign.protocol.roster import Roster
from fedalign.protocol.shares import shares_of, weighted
from fedalign.protocol.state import Costs, State
from fedalign.rules.rule import Broadcast, Split


def federated(
    plan: Plan,
    model: Model,
    start: int = 0,
    memory: tuple[Model, ...] = (),
    last: RoundRecord | None = None,
) -> Run:
    """Run prioritized federated learning from round ``start`` with ``model``.

    To go on with an earlier run, give the ``memory`` of its last ``RoundDone`` and its ``last`` record.
    """
    history = History()
    state = State.restore(model, memory, last)
    for round in range(start, plan.rounds):
        state, record = yield from _round(plan, round, state)
        before = round * last.theta if last is not None else 0.0
        last = record = replace(record, theta=(before + record.inclusion) / (round + 1))
        yield RoundDone(record, state.served, state.memory)
        history.rounds.append(record)
    return Result(state.served, history)


def alone(plan: Plan, models: Sequence[Model], start: int = 0) -> Run:
    """Let every client train its own model, with no server: what a client has without the federation."""
    roster, history, models = plan.roster, History(), list(models)
    everybody = tuple(range(len(roster)))
    for round in range(start, plan.rounds):
        measures = yield Evaluate(tuple(zip(models, everybody, strict=True)), plan.match_on)
        replies = yield Train(tuple(zip(models, everybody, strict=True)), round)
        own = dict(zip(everybody, measures, strict=True))
        bad = [roster.names[k] for k, reply in zip(everybody, replies, strict=True) if not reply.finite]
        if bad:
            raise DivergedError.at(round, bad, "the trained weights are not finite")
        models = [reply.model for reply in replies]
        priority = [k for k in everybody if roster.priority[k]]
        loss, accuracy = weighted(roster, {k: own[k] for k in priority})
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


def _round(plan: Plan, round: int, state: State) -> Generator[Request, Any, tuple[State, RoundRecord]]:
    costs = Costs(plan.work)
    try:
        return (yield from _attempt(plan, round, state, costs))
    except DivergedError:
        if state.alone is None:
            raise
    # Free clients have led the base astray. It begins again from the priority clients' own model.
    state = replace(state, base=state.alone, alone=None, fallback=Fallback(deficit=state.fallback.deficit))
    return (yield from _attempt(plan, round, state, costs))


def _attempt(plan: Plan, round: int, state: State, costs: Costs) -> Generator[Request, Any, tuple[State, RoundRecord]]:
    roster, rule = plan.roster, plan.rule
    presence = plan.participation.draw(round, roster, plan.seed)
    warmup = round < plan.warmup
    epsilon = rule.epsilon_at(round, plan.rounds)
    invite = rule.invites_free and not warmup
    priority = [k for k in range(len(roster)) if presence.reachable[k] and roster.priority[k]]
    free = [k for k in range(len(roster)) if presence.reachable[k] and not roster.priority[k] and invite]

    # F(w): the priority clients' own evaluations of w.
    model = state.base.model
    (own,) = yield from measure([model], priority, plan.match_on)
    costs.down += len(priority)
    asked = tuple(own)
    skipped: str | None = None
    loss = accuracy = None
    replies: dict[int, Reply] = {}
    choice: Choice | None = None
    broadcast: Broadcast | None = None
    if not own:
        skipped = "no priority client answered" if priority else "no priority client was reachable"
    else:
        loss, accuracy = weighted(roster, own)
        if not math.isfinite(loss):
            bad = [roster.names[k] for k, m in own.items() if not math.isfinite(m.loss)]
            raise DivergedError.at(round, bad, "the model's loss is not finite")
        # Broadcast, the free clients' offers, and local work.
        broadcast = Broadcast(round, loss, accuracy, epsilon)
        invited = sorted([*own, *free])
        costs.down += len(free)
        answers = yield Train(tuple((model, k) for k in invited), round, broadcast, rule, plan.match_on)
        replies = dict(zip(invited, answers, strict=True))
        own |= {k: reply.own for k, reply in replies.items() if not isinstance(reply, Lost) and reply.own is not None}
        # The server's decision, then the mean over those it admits.
        sent = [k for k, reply in replies.items() if isinstance(reply, Update)]
        costs.sent(sent)
        broken = [roster.names[k] for k, reply in replies.items() if isinstance(reply, Update) and not reply.finite]
        if broken:
            raise DivergedError.at(round, broken, "the trained weights are not finite")
        if any(roster.priority[k] for k in sent):
            offers = {k: own[k] for k in sent if not roster.priority[k]}
            base: Mapping[int, str] | None = None
            if rule.needs_updates:
                reference = shares_of(roster, presence, [k for k in sent if roster.priority[k]])
                similar = yield Compare(reference, tuple(sent))
                candidates, base = rule.compare(offers, similar, broadcast), rule.base(offers, similar, broadcast)
            else:
                candidates = rule.candidates(offers, broadcast)
            jury = _jury(plan, round, asked)
            choice = yield from choose(plan, round, presence, candidates, base, sent, jury, state.base)
            costs.down += choice.models_down
            state, choice = yield from settle(plan, presence, state, choice, asked, jury, broadcast, costs)
            epsilon = choice.epsilon
            broadcast = replace(broadcast, epsilon=epsilon)
        else:
            skipped = "no priority client sent an update"
    clients = client_rounds(plan, presence, broadcast, own, replies, choice, warmup, skipped)
    jobs = [(state.served, k) for k in range(len(roster)) if roster.priority[k]]
    scores = yield from _scores(plan, jobs, state.base.model)
    record = RoundRecord(
        round,
        epsilon,
        loss,
        accuracy,
        *scores,
        warmup,
        skipped,
        models_down=costs.down,
        models_up=costs.up,
        clients=clients,
        samples=costs.samples,
        tried=choice.tried if choice else (),
        fallback=state.fallback if state.fallback != Fallback() else None,
        base=state.apart,
        inclusion=_inclusion(roster, choice.base.shares if choice else {}),
    )
    return state, record


def _inclusion(roster: Roster, shares: Mapping[int, float]) -> float:
    return min(1.0, math.fsum(s for k, s in shares.items() if roster.priority[k])) if shares else 1.0


def _jury(plan: Plan, round: int, asked: tuple[int, ...]) -> tuple[int, ...]:
    """Name the priority clients that measure candidates."""
    drawn = plan.participation.jury(round, plan.roster, plan.seed)
    if drawn is None:
        return asked
    return tuple(k for k, there in enumerate(drawn.reachable) if there and plan.roster.priority[k]) or asked


def _scores(
    plan: Plan, jobs: list[Job], ahead: Model | None = None
) -> Generator[Request, Any, tuple[float | None, float | None, float | None]]:
    """Give test accuracy, test loss and training loss of what the priority clients now have."""

    def score(split: Split) -> Generator[Request, Any, tuple[float | None, float | None]]:
        measures = yield Evaluate(tuple(jobs), split, ahead if split == "test" else None)
        there = {k: m for (_, k), m in zip(jobs, measures, strict=True) if m is not None and m.samples}
        return weighted(plan.roster, there) if there else (None, None)

    test_loss, test_accuracy = (yield from score("test")) if plan.has_test else (None, None)
    train_loss, _ = (yield from score("train")) if plan.measure_training else (None, None)
    return test_accuracy, test_loss, train_loss
