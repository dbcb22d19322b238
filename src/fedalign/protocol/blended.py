"""Blended AutoALIGN: AutoALIGN's rounds, in which a weighted mean of the candidates is served.

The candidates of a round are AutoALIGN's, and the **kept model**: the served model of the round before, which the
priority clients train on. They measure all of them on held-out data, and the rule says how much each counts
(:class:`fedalign.Blend`). As in AutoALIGN, the next round starts from the **training model**, and the **priority-only
model** is served while the mean is worse.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, cast

from fedalign.errors import DivergedError
from fedalign.protocol.aggregate import shares, weighted_mean
from fedalign.protocol.autoalign import EXCLUDED, train_further
from fedalign.protocol.calibration import calibrated_mean
from fedalign.protocol.candidates import Mixes, Option, aggregate_candidates
from fedalign.protocol.fallback import Mean, assess
from fedalign.protocol.fedalign import broadcast, invite
from fedalign.protocol.messages import Evaluate, Measures, Request, Result, RoundDone, Run, Snapshot, WhoIsThere
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import Fallback, History, Tried
from fedalign.protocol.round_log import RoundLog
from fedalign.protocol.scores import measured_next, scores
from fedalign.protocol.valuing import plain_mix, value_round, with_previous
from fedalign.rules.blend import Blend
from fedalign.rules.rule import Broadcast, Selection
from fedalign.training.server import ServerModel


@dataclass(frozen=True)
class BlendedState:
    """What a round passes to the next. ``separate``: the training model is not the served one."""

    served: ServerModel
    training: ServerModel
    separate: bool = False
    priority_only: ServerModel | None = None  #: None while it would not differ from the training model
    fallback: Fallback = field(default_factory=Fallback)

    def snapshot(self, round: int, theta: float) -> Snapshot:
        """Return the state as named tensors and values, for a resume."""
        training = self.training.named("training") if self.separate else {}
        own = {} if self.priority_only is None else self.priority_only.named("priority_only")
        values = {"theta": theta, "fallback": asdict(self.fallback)}
        return Snapshot(round, {**self.served.named("model"), **training, **own}, values)

    @classmethod
    def restore(cls, snapshot: Snapshot) -> BlendedState:
        """Read a snapshot; that of a new run holds the initial ``model`` alone."""
        tensors = snapshot.tensors
        served, separate = ServerModel.restore("model", tensors), "training" in tensors
        return cls(
            served,
            ServerModel.restore("training", tensors) if separate else served,
            separate,
            ServerModel.restore("priority_only", tensors) if "priority_only" in tensors else None,
            Fallback(**snapshot.values.get("fallback", {})),
        )


def blended(plan: Plan, snapshot: Snapshot) -> Run:
    """Run blended AutoALIGN from a snapshot to its last round."""
    history, state = History(), BlendedState.restore(snapshot)
    theta, previous = snapshot.values.get("theta", 0.0), snapshot.tensors.get("previous")
    for t in range(snapshot.round, plan.rounds):
        log, previous = RoundLog(plan, t, previous), state.training.weights
        state = yield from blended_round(plan, t, state, log)
        measured = yield from scores(plan, log.roster, state.served.weights, state.training.weights)
        theta = (t * theta + log.inclusion) / (t + 1)
        shown = None if state.fallback == Fallback() else state.fallback
        record = log.record(measured, theta, shown, separate_training=state.separate)
        yield RoundDone(record, state.served.weights, with_previous(plan, state.snapshot(t + 1, theta), previous))
        history.rounds.append(record)
    return Result(state.served.weights, history)


def blended_round(plan: Plan, t: int, state: BlendedState, log: RoundLog) -> Generator[Request, Any, BlendedState]:
    """Run round t. If training diverges, begin again from the priority-only model: free clients caused it."""
    log.present = yield WhoIsThere(t)
    try:
        return (yield from _attempt(plan, t, state, log))
    except DivergedError:
        if state.priority_only is None:
            raise
    log.restart()
    own, fallback = state.priority_only, Fallback(deficit=state.fallback.deficit)
    return (yield from _attempt(plan, t, BlendedState(own, own, fallback=fallback), log))


def _attempt(plan: Plan, t: int, state: BlendedState, log: RoundLog) -> Generator[Request, Any, BlendedState]:
    rule = cast(Blend, plan.rule)
    sent = yield from broadcast(plan, t, state.training.weights, log)
    if sent is None:
        return state
    answered = tuple(log.measures)
    beside = state.priority_only.weights if rule.fallback and state.priority_only is not None else None
    offers = yield from invite(plan, state.training.weights, sent, log, beside)
    if not log.trained:
        return state
    drawn = yield WhoIsThere(t, "evaluate")
    evaluators = (drawn.priority if drawn is not None else ()) or answered
    asked, means, offers = yield from aggregate_candidates(plan, rule, sent, offers, log)
    fresh = [
        Option(state.training.step(mean, plan.server), mix.shares) for mean, mix in zip(means, asked.mixes, strict=True)
    ]
    if plan.ledger is not None:  # before other models are trained: updates are held until then
        free, known = yield from _clients_to_value(plan, rule, asked, fresh, evaluators, log)
        yield from value_round(plan, log, state.training, evaluators, free, partial(plain_mix, log), known)
    models = yield from _further_models(plan, rule, state, fresh, asked, answered, sent, log)
    return (yield from _serve(plan, rule, state, asked, models, evaluators, log))


def _clients_to_value(
    plan: Plan, rule: Blend, asked: Mixes, fresh: Sequence[Option], evaluators: tuple[int, ...], log: RoundLog
) -> Generator[Request, Any, tuple[set[int], dict[frozenset[int], Measures]]]:
    """Return the free clients in the training model or in candidates that weigh, and what was measured of these.

    The weights are those without the kept model, which is not trained yet. With it a candidate may weigh less, and
    never more in relation to the others.
    """
    count, measured = len(asked.candidates), dict[frozenset[int], Measures]()
    weights = [1.0]
    if count > 1:
        to_ask = tuple((option.server.weights, evaluators) for option in fresh[:count])
        answers: list[Measures] = yield Evaluate(to_ask, plan.evaluate_on, tempered=rule.calibrated)
        log.sent_down(count * len(evaluators))
        losses, answers = _losses(rule, log, evaluators, answers, count)
        weights = rule.weigh(losses, _samples(log, answers[0]), kept=False)
        if plan.ledger is not None and (rule.calibrated or not plan.ledger.calibrated):  # else other losses count
            usual = [not (one.weight or one.scale or one.step) for one in asked.candidates]
            measured = {
                frozenset(one.clients): found
                for one, found, ok in zip(asked.candidates, answers, usual, strict=True)
                if ok and found
            }
    used = [option for option, weight in zip(fresh, weights, strict=False) if weight > 0]
    used += [] if asked.training is None else [fresh[asked.training]]
    free = {k for option in used for k, share in option.shares.items() if share > 0 and not log.roster.priority[k]}
    return free, measured


def _losses(
    rule: Blend, log: RoundLog, evaluators: tuple[int, ...], answers: Sequence[Measures], count: int
) -> tuple[list[float], list[Measures]]:
    """Return the loss of the first ``count`` models, and the measures of the evaluators that count.

    An evaluator that stopped answering must not favour one candidate: those that measured all count.
    """
    mean: Mean = calibrated_mean if rule.calibrated else weighted_mean
    complete = [k for k in evaluators if all(k in of_model and of_model[k].samples for of_model in answers)]
    kept = [{k: of_model[k] for k in complete} for of_model in answers]
    return [mean(log.roster, of_model)[0] if complete else math.inf for of_model in kept[:count]], kept


@dataclass(frozen=True)
class _Models:
    """The models of a round: the candidates, the kept one last; the training model; the priority-only model."""

    candidates: list[Option]
    kept: bool
    training: Option | None  #: None: the next round trains the served model
    priority_only: Option | None


def _further_models(
    plan: Plan, rule: Blend, state: BlendedState, fresh: Sequence[Option], asked: Mixes, clients: tuple[int, ...],
    sent: Broadcast, log: RoundLog,
) -> Generator[Request, Any, _Models]:  # fmt: skip
    """Let the priority clients train the kept and the priority-only model, where these have a history of their own."""
    candidates = list(fresh[: len(asked.candidates)])
    training = None if asked.training is None else fresh[asked.training]
    alone = next((i for i, one in enumerate(asked.candidates) if not one.clients), None)
    own = None
    if rule.fallback and state.priority_only is not None:
        model, trained = yield from train_further(plan, state.priority_only, clients, sent, log)
        own = Option(model, shares(log.present, trained or log.trained))
    elif rule.fallback and alone is not None and alone != asked.training:
        own = candidates[alone]
    if state.separate:
        model, trained = yield from train_further(plan, state.served, clients, sent, log)
        candidates.append(Option(model, shares(log.present, trained or log.trained)))
    return _Models(candidates, state.separate, training, own)


def _serve(
    plan: Plan, rule: Blend, state: BlendedState, asked: Mixes, models: _Models, evaluators: tuple[int, ...],
    log: RoundLog,
) -> Generator[Request, Any, BlendedState]:  # fmt: skip
    """Measure the candidates, blend them, and compare the blend with the priority-only model."""
    mean: Mean = calibrated_mean if rule.calibrated else weighted_mean
    candidates, own = models.candidates, models.priority_only
    weights, own_measures = [1.0], None
    measured = candidates if own is None or any(own is one for one in candidates) else [*candidates, own]
    if len(measured) > 1:
        to_ask = tuple((option.server.weights, evaluators) for option in measured)
        answers: list[Measures] = yield Evaluate(to_ask, plan.evaluate_on, tempered=rule.calibrated)
        log.sent_down(len(measured) * len(evaluators))
        losses, answers = _losses(rule, log, evaluators, answers, len(candidates))
        own_measures = next((found for one, found in zip(measured, answers, strict=True) if one is own), None)
        weights = rule.weigh(losses, _samples(log, answers[0]), models.kept)
        log.tried = _tried(asked, losses, weights)
    served = blend(candidates, weights)
    training = served if models.training is None else models.training
    new = BlendedState(served.server, training.server, training.server is not served.server, None, state.fallback)
    selection = _selection(asked, served, weights, log)
    if own is not None:
        ahead = measured_next(plan, (served.server.weights, own.server.weights), training.server.weights)
        to_ask = ((served.server.weights, evaluators),)
        (chosen,) = yield Evaluate(to_ask, plan.evaluate_on, ahead, tempered=rule.calibrated)
        log.sent_down(len(evaluators))
        fallback = assess(log.roster, state.fallback, chosen, own_measures or {}, credit=rule.credit, mean=mean)
        new = replace(new, priority_only=own.server, fallback=fallback)
        if fallback.behind:
            selection = replace(selection, reasons=dict.fromkeys(served.shares, EXCLUDED))
            new, served = replace(new, served=own.server, separate=True), own
    log.admitted(selection, served.shares, (training.shares, asked.training_reasons))
    return new


def blend(options: Sequence[Option], weights: Sequence[float]) -> Option:
    """Return the weighted mean of models; one that weighs all is returned as it is.

    >>> two = [Option(ServerModel(1.0), {0: 1.0}), Option(ServerModel(3.0), {0: 0.5, 1: 0.5})]
    >>> blend(two, [0.5, 0.5])
    Option(server=ServerModel(weights=2.0, memory={}), shares={0: 0.75, 1: 0.25}, measures=None)
    """
    used = [(option, weight) for option, weight in zip(options, weights, strict=True) if weight > 0]
    if len(used) == 1:
        return used[0][0]
    mean, parts, memory = 0.0, dict[int, float](), dict[str, Any]()
    for option, weight in used:
        mean = option.server.weights * weight + mean
        for k, share in option.shares.items():
            parts[k] = parts.get(k, 0.0) + weight * share
        for name, tensor in option.server.memory.items():
            memory[name] = tensor * weight + memory.get(name, 0.0)
    return Option(ServerModel(mean, memory), parts)


def _samples(log: RoundLog, measures: Measures) -> float:
    """Return the number of samples whose plain mean would be as exact as the clients' weighted mean."""
    p = {k: float(log.roster.p[k]) for k in measures}
    return math.fsum(p.values()) ** 2 / math.fsum(w**2 / measures[k].samples for k, w in p.items()) if p else 0.0


def _tried(asked: Mixes, losses: Sequence[float], weights: Sequence[float]) -> tuple[Tried, ...]:
    heaviest = _heaviest(asked, weights)
    return tuple(
        Tried(one.epsilon, len(one.clients), losses[i] if math.isfinite(losses[i]) else None, i == heaviest)
        for i, one in enumerate(asked.candidates)
    )


def _heaviest(asked: Mixes, weights: Sequence[float]) -> int:
    return max(range(len(asked.candidates)), key=weights.__getitem__)


def _selection(asked: Mixes, served: Option, weights: Sequence[float], log: RoundLog) -> Selection:
    """Describe the blend for the record: its free clients, the ε of its heaviest set, and a reason for each client."""
    part: Mapping[int, float] = {
        k: math.fsum(w for one, w in zip(asked.candidates, weights, strict=False) if k in one.clients)
        for one in asked.candidates
        for k in one.clients
    }
    admitted = tuple(k for k in sorted(served.shares) if not log.roster.priority[k])
    reasons = {k: f"in candidates that weigh {weight:.3g} of 1 together" for k, weight in part.items()}
    return Selection(admitted, epsilon=asked.candidates[_heaviest(asked, weights)].epsilon, reasons=reasons)
