"""AutoALIGN: FedALIGN's rounds, with ε chosen by the priority clients in every round.

A round begins as FedALIGN's does. Then the server aggregates several candidate sets of free clients, the priority
clients measure them on held-out data, and the best one is the **served model**. The next round starts from the
**training model**, an aggregate over more clients. FedAvg on the priority clients is also trained, as the
**priority-only model**; it is served while the choices are worse (``fallback.py``).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, cast

from fedalign.errors import DivergedError
from fedalign.protocol.aggregate import shares, weighted_mean
from fedalign.protocol.calibration import calibrated_mean
from fedalign.protocol.candidates import Choice, Option, choose
from fedalign.protocol.fallback import assess
from fedalign.protocol.fedalign import broadcast, invite
from fedalign.protocol.messages import (
    Aggregate,
    Evaluate,
    Invite,
    Mix,
    Model,
    Offered,
    Request,
    Result,
    RoundDone,
    Run,
    Snapshot,
    WhoIsThere,
)
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import Fallback, History
from fedalign.protocol.round_log import RoundLog
from fedalign.protocol.scores import measured_next, scores
from fedalign.protocol.valuing import plain_mix, value_round, with_previous
from fedalign.rules.auto import AutoAlign
from fedalign.rules.rule import Broadcast
from fedalign.training.server import ServerModel

# Kept from version 0.1: users script against reasons.
EXCLUDED = "set aside: smoothed over rounds, the priority clients are better off alone"


@dataclass(frozen=True)
class AutoState:
    """What a round of AutoALIGN passes to the next. ``separate``: the training model is not the served one."""

    served: Model
    training: ServerModel
    separate: bool = False
    priority_only: ServerModel | None = None  #: None while it would not differ from the training model
    fallback: Fallback = field(default_factory=Fallback)

    def snapshot(self, round: int, theta: float) -> Snapshot:
        """Return the state as named tensors and values, for a resume."""
        training = self.training.named("training")
        if not self.separate:
            del training["training"]
        own = {} if self.priority_only is None else self.priority_only.named("priority_only")
        values = {"theta": theta, "fallback": asdict(self.fallback)}
        return Snapshot(round, {"model": self.served, **training, **own}, values)

    @classmethod
    def restore(cls, snapshot: Snapshot) -> AutoState:
        """Read a snapshot; that of a new run holds the initial ``model`` alone."""
        tensors = snapshot.tensors
        return cls(
            tensors["model"],
            ServerModel.restore("training", {"training": tensors["model"], **tensors}),
            "training" in tensors,
            ServerModel.restore("priority_only", tensors) if "priority_only" in tensors else None,
            Fallback(**snapshot.values.get("fallback", {})),
        )


def autoalign(plan: Plan, snapshot: Snapshot) -> Run:
    """Run AutoALIGN from a snapshot to its last round."""
    history, state = History(), AutoState.restore(snapshot)
    theta, previous = snapshot.values.get("theta", 0.0), snapshot.tensors.get("previous")
    for t in range(snapshot.round, plan.rounds):
        log, previous = RoundLog(plan, t, previous), state.training.weights
        state = yield from autoalign_round(plan, t, state, log)
        measured = yield from scores(plan, log.roster, state.served, state.training.weights)
        theta = (t * theta + log.inclusion) / (t + 1)
        shown = None if state.fallback == Fallback() else state.fallback
        record = log.record(measured, theta, shown, separate_training=state.separate)
        yield RoundDone(record, state.served, with_previous(plan, state.snapshot(t + 1, theta), previous))
        history.rounds.append(record)
    return Result(state.served, history)


def autoalign_round(plan: Plan, t: int, state: AutoState, log: RoundLog) -> Generator[Request, Any, AutoState]:
    """Run round t. If training diverges, begin again from the priority-only model: free clients caused it."""
    log.present = yield WhoIsThere(t)
    try:
        return (yield from _attempt(plan, t, state, log))
    except DivergedError:
        if state.priority_only is None:
            raise
    log.restart()
    fallback = Fallback(deficit=state.fallback.deficit)
    state = AutoState(state.served, state.priority_only, separate=True, fallback=fallback)
    return (yield from _attempt(plan, t, state, log))


def _attempt(plan: Plan, t: int, state: AutoState, log: RoundLog) -> Generator[Request, Any, AutoState]:
    rule = cast(AutoAlign, plan.rule)
    w = state.training.weights
    sent = yield from broadcast(plan, t, w, log)
    if sent is None:
        return state
    answered = tuple(log.measures)
    beside = state.priority_only.weights if rule.fallback and state.priority_only is not None else None
    offers = yield from invite(plan, w, sent, log, beside)
    if not log.trained:
        return state
    drawn = yield WhoIsThere(t, "evaluate")
    evaluators = (drawn.priority if drawn is not None else ()) or answered
    choice = yield from choose(plan, rule, sent, offers, evaluators, state.training, log)
    served, training = choice.options[choice.served], choice.options[choice.training]
    if plan.ledger is not None:  # before the priority-only model is trained: updates are held until then
        free, mix = choice.free_clients(log.roster), partial(plain_mix, log)
        yield from value_round(plan, log, state.training, evaluators, free, mix, choice.measured)
    new = AutoState(served.server.weights, training.server, choice.training != choice.served, None, state.fallback)
    if rule.fallback and (state.priority_only is not None or choice.priority_only not in (None, choice.training)):
        own = yield from train_priority_only(plan, state, choice, answered, sent, log)
        fallback = yield from compare_with_priority_only(
            plan, state, choice, own, evaluators, log, rule.credit, calibrated=rule.calibrated
        )
        new = replace(new, priority_only=own.server, fallback=fallback)
        if fallback.behind:
            reasons = dict.fromkeys(served.shares, EXCLUDED)
            choice = replace(choice, selection=replace(choice.selection, reasons=reasons))
            new, served = replace(new, served=own.server.weights, separate=True), own
    log.admitted(choice.selection, served.shares, (training.shares, choice.training_reasons))
    return new


def train_priority_only(
    plan: Plan, state: AutoState, choice: Choice, clients: tuple[int, ...], sent: Broadcast, log: RoundLog
) -> Generator[Request, Any, Option]:
    """Return this round's priority-only model: a candidate of the round, until it has a history of its own.

    Then the priority clients train it further. Where that fails, it stays as it is.
    """
    if state.priority_only is None:
        assert choice.priority_only is not None
        return choice.options[choice.priority_only]
    model, trained = yield from train_further(plan, state.priority_only, clients, sent, log)
    members = trained or [k for k in choice.options[choice.training].shares if log.roster.priority[k]]
    return Option(model, shares(log.present, members))


def train_further(
    plan: Plan, model: ServerModel, clients: tuple[int, ...], sent: Broadcast, log: RoundLog
) -> Generator[Request, Any, tuple[ServerModel, list[int]]]:
    """Let priority clients train a model for a round, and return it with the clients that sent an update.

    Where that fails, the model stays as it is.
    """
    replies: Mapping[int, object] = yield Invite(model.weights, clients, sent, plan.rule, plan.match_on)
    trained = [k for k in clients if isinstance(replies[k], Offered)]
    log.sent_down(len(clients))
    log.sent_up(trained)
    if trained:
        aggregated = yield Aggregate((Mix(shares(log.present, trained)),))
        if not aggregated.refused:
            model = model.step(aggregated.models[0], plan.server)
    return model, trained


def compare_with_priority_only(
    plan: Plan, state: AutoState, choice: Choice, own: Option, evaluators: tuple[int, ...], log: RoundLog, credit: bool,
    promise: bool = False, calibrated: bool = False,
) -> Generator[Request, Any, Fallback]:  # fmt: skip
    """Let the evaluators measure what they have not measured yet, and compare the choice with the fallback.

    One of the two is served then, so the request says what will be asked about them. With ``promise`` that includes a
    comparison of the two, sample by sample. With ``calibrated``, losses are those at the best temperature.
    """
    served, training = choice.options[choice.served], choice.options[choice.training]
    options = {"served": served}
    if state.priority_only is not None or choice.served != choice.priority_only:
        options["priority_only"] = own
    measures = {name: option.measures for name, option in options.items() if option.measures is not None}
    unknown = [name for name in options if name not in measures]
    if unknown:
        asked = tuple((options[name].server.weights, evaluators) for name in unknown)
        ahead = measured_next(plan, (served.server.weights, own.server.weights), training.server.weights)
        both = (served.server.weights, own.server.weights) if promise else None
        measures |= zip(
            unknown, (yield Evaluate(asked, plan.evaluate_on, ahead, both, tempered=calibrated)), strict=True
        )
        log.sent_down(len(unknown) * len(evaluators))
    own_measures = measures.get("priority_only", measures["served"])
    mean = calibrated_mean if calibrated else weighted_mean
    return assess(log.roster, state.fallback, measures["served"], own_measures, credit=credit, mean=mean)
