"""Rounds in which a rule weighs every client, priority clients included, by what the priority clients measure.

A round begins as FedALIGN's does, and every client that offers trains. The rule then tries means of the clients' models
(``trial.py``) and says how much each client counts. The aggregate with these weights is served, and the next round
starts from it. If the priority clients cannot measure a finite loss of it, FedAvg's aggregate on them is taken.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from fedalign.errors import FedalignError
from fedalign.protocol.aggregate import capped, check_selection, shares
from fedalign.protocol.fedalign import broadcast, invite
from fedalign.protocol.messages import (
    Aggregate,
    Mix,
    Request,
    Result,
    RoundDone,
    Run,
    Snapshot,
    WhoIsThere,
)
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import History
from fedalign.protocol.round_log import RoundLog
from fedalign.protocol.scores import scores
from fedalign.protocol.trial import Trial
from fedalign.protocol.valuing import value_round, with_previous
from fedalign.rules.rule import Selection
from fedalign.rules.weighing import Weighed, WeighingRule
from fedalign.training.server import ServerModel

_LEAST = 1e-12  # a smaller share changes no float32 number of the aggregate
_NOT_FINITE = "the aggregate with these weights has no finite loss: the priority clients' own is taken"
_NOBODY = "no client has a weight: the priority clients' own aggregate is taken"


@dataclass(frozen=True)
class WeighingState:
    """What a round passes to the next: the server's model, and what the rule keeps in mind."""

    server: ServerModel
    memory: Mapping[str, Any] = field(default_factory=dict)


def weighing(plan: Plan, snapshot: Snapshot) -> Run:
    """Run from a snapshot to the last round. The snapshot of a new run holds the initial ``model`` alone."""
    history = History()
    values = snapshot.values
    state = WeighingState(ServerModel.restore("model", snapshot.tensors), values.get("memory", {}))
    theta, previous = values.get("theta", 0.0), snapshot.tensors.get("previous")
    for t in range(snapshot.round, plan.rounds):
        log, previous = RoundLog(plan, t, previous), state.server.weights
        state = yield from weighing_round(plan, t, state, log)
        measured = yield from scores(plan, log.roster, state.server.weights)
        theta = (t * theta + log.inclusion) / (t + 1)
        record = log.record(measured, theta)
        values = {"theta": theta, "memory": state.memory}
        saved = Snapshot(t + 1, state.server.named("model"), values)
        yield RoundDone(record, state.server.weights, with_previous(plan, saved, previous))
        history.rounds.append(record)
    return Result(state.server.weights, history)


def weighing_round(plan: Plan, t: int, state: WeighingState, log: RoundLog) -> Generator[Request, Any, WeighingState]:
    """Run round t from the server's model, and return the state for the next round."""
    log.present = yield WhoIsThere(t)
    sent = yield from broadcast(plan, t, state.server.weights, log)
    if sent is None:
        return state
    answered = tuple(log.measures)
    offers = yield from invite(plan, state.server.weights, sent, log)
    if not log.trained:
        return state
    allowed = check_selection(plan.rule, plan.rule.select(offers, sent), offers)
    weights, reasons, memory = shares(log.present, log.trained), dict(allowed.reasons), state.memory
    if allowed.clients:  # else FedAvg on the priority clients, as during warm-up
        trial = yield from _trial(plan, allowed.clients, state, log, answered)
        weighed = yield from cast(WeighingRule, plan.rule).weigh(trial)
        weights, why = yield from _checked(trial, weighed)
        reasons, memory = {**reasons, **weighed.reasons, **why}, weighed.memory
    aggregated = yield Aggregate((Mix(weights),), again=plan.ledger is not None)
    log.refuse(aggregated.refused)
    free = tuple(k for k in weights if not log.roster.priority[k])
    log.admitted(Selection(free, reasons=reasons), weights)
    if plan.ledger is not None:
        evaluators = yield from _evaluators(log, answered)
        yield from value_round(plan, log, state.server, evaluators, free, partial(restricted_mix, log, weights))
    return WeighingState(state.server.step(aggregated.models[0], plan.server), memory)


def _trial(
    plan: Plan, free: Sequence[int], state: WeighingState, log: RoundLog, answered: tuple[int, ...]
) -> Generator[Request, Any, Trial]:
    """Draw the evaluators, and collect the models of the priority clients and of some free clients."""
    evaluators = yield from _evaluators(log, answered)
    clients = tuple(sorted([*log.trained, *free]))
    aggregated = yield Aggregate(tuple(Mix({k: 1.0}) for k in clients), again=True)
    log.refuse(aggregated.refused)  # updates were checked when they were compared: training has diverged
    models = dict(zip(clients, aggregated.models, strict=True))
    return Trial(plan, log, state.server, evaluators, models, state.memory)


def _evaluators(log: RoundLog, answered: tuple[int, ...]) -> Generator[Request, Any, tuple[int, ...]]:
    """Draw the priority clients that measure models; if none is drawn, those that have answered do."""
    drawn = yield WhoIsThere(log.round, "evaluate")
    return (drawn.priority if drawn is not None else ()) or answered


def restricted_mix(log: RoundLog, weights: Mapping[int, float], free: Collection[int]) -> Mix:
    """Describe the aggregate of the priority clients and some free ones, for the ledger.

    They have the rule's weights. Without free clients it is FedAvg's aggregate, since a rule may leave priority clients
    out for the sake of free ones.
    """
    if not free:
        return Mix(shares(log.present, log.trained))
    kept = {k: weight for k, weight in weights.items() if log.roster.priority[k] or k in free}
    total = math.fsum(kept.values())
    return Mix({k: weight / total for k, weight in kept.items()})


def _checked(trial: Trial, weighed: Weighed) -> Generator[Request, Any, tuple[dict[int, float], dict[int, str]]]:
    """Return the shares of the aggregate: the rule's, if the priority clients measure a finite loss with them.

    Where they are not the rule's, the second value says so for every client that had a weight.
    """
    found = shares_of(trial, weighed)
    if not found:
        return trial.priority_only(), dict.fromkeys(trial.models, _NOBODY)
    (loss,) = yield from trial.losses([trial.mean(found)])
    if math.isfinite(loss):
        return found, {}
    return trial.priority_only(), dict.fromkeys(found, _NOT_FINITE)


def shares_of(trial: Trial, weighed: Weighed) -> dict[int, float]:
    """Return the clients' shares of the aggregate, within the roster's caps; empty if no client has a weight.

    Raises :class:`FedalignError` for a weight that is negative or not finite, or that belongs to another client.
    """
    name = type(trial.plan.rule).__name__
    for k, weight in weighed.weights.items():
        if k not in trial.models:
            raise FedalignError(f"{name} gives a weight to client {k}, whose update is not there to be weighed")
        if not 0 <= weight < math.inf:
            raise FedalignError(f"{name} gives client {k} the weight {weight}; it must be a finite number, 0 or more")
    largest = max(weighed.weights.values(), default=0.0)
    if largest == 0:
        return {}
    scaled = {k: weight / largest for k, weight in sorted(weighed.weights.items())}  # a sum could overflow, or vanish
    weights = capped(scaled, trial.log.roster)
    total = math.fsum(weights.values())
    kept = {k: weight for k, weight in weights.items() if weight > _LEAST * total}
    total = math.fsum(kept.values())
    return {k: weight / total for k, weight in kept.items()}
