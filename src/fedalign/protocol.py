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
import numbers
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedalign.choice import Choice, Mean, choose
from fedalign.errors import DivergedError, FedalignError
from fedalign.fallback import go_on_alone, judge, measure
from fedalign.history import ClientRound, Decision, Fallback, History, RoundRecord
from fedalign.messages import (
    Compare,
    Declined,
    Evaluate,
    Job,
    Lost,
    Model,
    Rejected,
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
from fedalign.rules import Broadcast, Rule, Split
from fedalign.server import Branch, ServerOptimizer
from fedalign.shares import shares_of, weighted


@dataclass(frozen=True)
class Plan:
    """Everything a run's decisions depend on."""

    roster: Roster
    rule: Rule
    rounds: int
    warmup: int = 0  #: the first so many rounds are for priority clients only
    participation: Participation = Full()
    seed: int = 0
    match_on: Split = "heldout"  #: the data that F and F_k are measured on
    judge_on: Split = "heldout"  #: the data that the priority clients choose by
    has_test: bool = True
    measure_training: bool = True  #: also measure every aggregate on the priority clients' training data
    server: ServerOptimizer | None = None  #: None: take the mean, as FedAvg does
    work: tuple[int, ...] = ()  #: the samples, passes included, that each client trains on in a round; for the record


@dataclass(frozen=True)
class _State:
    """What a round leaves to the next.

    ``served`` is what the priority clients have. The next round starts from ``base``, which is the same model with
    most rules; ``alone`` is the priority clients' own where the rule keeps a way back.
    """

    served: Model
    base: Branch
    alone: Branch | None = None
    fallback: Fallback = Fallback()

    @property
    def apart(self) -> bool:
        """Whether the next round starts from another model than this one serves."""
        return self.base.model is not self.served

    @property
    def memory(self) -> tuple[Model, ...]:
        """What is stored beside the model that is served."""
        base = (self.base.model,) if self.apart else ()
        alone = () if self.alone is None else (self.alone.model, *self.alone.memory)
        return (*base, *self.base.memory, *alone)

    @classmethod
    def restore(cls, model: Model, memory: tuple[Model, ...], last: RoundRecord | None) -> _State:
        """Read :attr:`memory` back."""
        fallback = (last.fallback if last is not None else None) or Fallback()
        start, memory = (memory[0], memory[1:]) if last is not None and last.base else (model, memory)
        if not fallback.apart:
            return cls(model, Branch(start, memory), None, fallback)
        half = len(memory) // 2
        return cls(model, Branch(start, memory[:half]), Branch(memory[half], memory[half + 1 :]), fallback)


@dataclass
class _Costs:
    """What a round takes. A model counts once for every client that it is sent to in the round.

    That a client measures it, and then trains it, makes no difference; reported test figures don't count.
    """

    down: int = 0
    up: int = 0
    samples: int = 0


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
    state = _State.restore(model, memory, last)
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


def _round(plan: Plan, round: int, state: _State) -> Generator[Request, Any, tuple[_State, RoundRecord]]:
    costs = _Costs()
    try:
        return (yield from _attempt(plan, round, state, costs))
    except DivergedError:
        if state.alone is None:
            raise
    # Free clients have led the base astray. It begins again from the priority clients' own model.
    state = replace(state, base=state.alone, alone=None, fallback=Fallback(deficit=state.fallback.deficit))
    return (yield from _attempt(plan, round, state, costs))


def _attempt(
    plan: Plan, round: int, state: _State, costs: _Costs
) -> Generator[Request, Any, tuple[_State, RoundRecord]]:
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
    base: Mapping[int, str] | None = None
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
        costs.up += len(sent)
        costs.samples += sum(plan.work[k] for k in sent) if plan.work else 0
        broken = [roster.names[k] for k, reply in replies.items() if isinstance(reply, Update) and not reply.finite]
        if broken:
            raise DivergedError.at(round, broken, "the trained weights are not finite")
        if any(roster.priority[k] for k in sent):
            offers = {k: own[k] for k in sent if not roster.priority[k]}
            if rule.needs_updates:
                reference = shares_of(roster, presence, [k for k in sent if roster.priority[k]])
                similar = yield Compare(reference, tuple(sent))
                candidates, base = rule.compare(offers, similar, broadcast), rule.base(offers, similar, broadcast)
            else:
                candidates = rule.candidates(offers, broadcast)
            jury = _jury(plan, round, asked)
            choice = yield from choose(
                rule, candidates, base, round, roster, presence, sent, jury, plan.judge_on, state.base, plan.server
            )
            costs.down += choice.models_down
            state, choice = yield from _settle(plan, presence, state, choice, asked, jury, broadcast, costs)
            epsilon = choice.epsilon
            broadcast = replace(broadcast, epsilon=epsilon)
        else:
            skipped = "no priority client sent an update"
    shares = choice.served.shares if choice is not None else {}
    base_shares = choice.base.shares if choice is not None else {}

    def record_of(k: int, name: str) -> ClientRound:
        decision, reason = _decision(plan, k, presence, warmup, replies.get(k), k in shares, k in base_shares, skipped)
        mine = own.get(k)
        if choice is not None and k in choice.broken:
            reason = "its trained weights are not finite"
        elif choice is not None and isinstance(replies.get(k), Update):
            reason = reason or (base if decision == "base" and base else choice.reasons).get(k, "")
        if not reason and mine is not None:
            reason = rule.why(mine, broadcast, decision == "admitted")
        return ClientRound(
            k,
            name,
            roster.priority[k],
            presence.reachable[k],
            mine.loss if mine else None,
            mine.accuracy if mine else None,
            decision,
            shares.get(k, 0.0),
            reason,
        )

    clients = tuple(record_of(k, name) for k, name in enumerate(roster.names))
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
        inclusion=_inclusion(roster, base_shares),
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


def _settle(
    plan: Plan,
    presence: Presence,
    state: _State,
    choice: Choice,
    clients: tuple[int, ...],
    judges: tuple[int, ...],
    broadcast: Broadcast,
    costs: _Costs,
) -> Generator[Request, Any, tuple[_State, Choice]]:
    """Move to what was chosen, or serve the priority clients' own model."""
    base, served, own = choice.base.branch, choice.served, choice.alone
    if not plan.rule.fallback or (state.alone is None and (own is None or choice.base is own)):
        return _State(served.branch.model, base, None, state.fallback), choice
    if state.alone is not None:
        alone, trained = yield from go_on_alone(
            state.alone, plan.roster, presence, plan.server, clients, broadcast, plan.match_on
        )
        costs.down += len(clients)
        costs.up += len(trained)
        costs.samples += sum(plan.work[k] for k in trained) if plan.work else 0
        members = trained or [k for k in choice.base.shares if plan.roster.priority[k]]
        own = Mean(alone, shares_of(plan.roster, presence, members))
    assert own is not None
    unknown = [one for one in ((served,) if served is own else (served, own)) if one.measures is None]
    found = yield from measure([one.branch.model for one in unknown], judges, plan.judge_on)
    costs.down += len(unknown) * len(judges)
    measures = {id(one): its for one, its in zip(unknown, found, strict=True)}
    fallback = judge(
        plan.roster, state.fallback, *(measures.get(id(one)) or one.measures or {} for one in (served, own))
    )
    if fallback.behind:
        why = "set aside: smoothed over rounds, the priority clients are better off alone"
        choice = replace(choice, served=own, reasons=dict.fromkeys(served.shares, why))
    return _State(choice.served.branch.model, base, own.branch, fallback), choice


def _decision(
    plan: Plan,
    k: int,
    presence: Presence,
    warmup: bool,
    reply: Reply | None,
    included: bool,
    in_base: bool,
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
        if not plan.rule.invites_free:
            return "absent", "not invited by the rule"
        return "absent", skipped or ""
    if isinstance(reply, Lost):
        return "lost", reply.reason
    if isinstance(reply, Rejected):
        return "refused", reply.reason
    if isinstance(reply, Declined):
        return "declined", reply.reason
    if is_priority:
        return "trained", "priority"
    if included or in_base:
        return ("admitted" if included else "base"), ""
    return "refused", skipped or ""


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
