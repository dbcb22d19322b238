"""AutoALIGN's choice: aggregate every candidate set, and serve the one that the priority clients measure best."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedalign.errors import FedalignError
from fedalign.protocol.aggregate import check_selection, mix_of, shares, weighted_mean
from fedalign.protocol.calibration import calibrated_mean
from fedalign.protocol.fedalign import Offers, without
from fedalign.protocol.messages import Aggregate, Aggregated, Evaluate, Measures, Mix, Model, Request
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import Tried
from fedalign.protocol.roster import Roster
from fedalign.protocol.round_log import RoundLog
from fedalign.rules.auto import AutoAlign
from fedalign.rules.rule import Broadcast, Measure, Selection
from fedalign.training.server import ServerModel


@dataclass(frozen=True)
class Option:
    """A model that the server could move to: its clients' shares, and the evaluators' measures if they were asked."""

    server: ServerModel
    shares: Mapping[int, float]
    measures: Mapping[int, Measure] | None = None


@dataclass(frozen=True)
class Choice:
    """The options of a round by index: the one to serve, the one to train on, the one of priority clients alone.

    ``measured`` has the evaluators' measures of all candidates with the usual weights, by their free clients.
    """

    options: Mapping[int, Option]
    served: int
    training: int
    priority_only: int | None
    selection: Selection
    training_reasons: Mapping[int, str]
    measured: Mapping[frozenset[int], Measures] = field(default_factory=dict)

    def free_clients(self, roster: Roster) -> set[int]:
        """Return the free clients whose updates are in the model to serve, or in the one to train on."""
        both = self.options[self.served], self.options[self.training]
        return {k for option in both for k in option.shares if not roster.priority[k]}


@dataclass(frozen=True)
class Mixes:
    """The mixes to aggregate: one for each candidate, and the training model's, which may be one of those."""

    candidates: list[Selection]
    mixes: list[Mix]
    training: int | None
    training_reasons: Mapping[int, str]


def choose(
    plan: Plan, rule: AutoAlign, sent: Broadcast, offers: Offers, evaluators: Sequence[int], before: ServerModel,
    log: RoundLog,
) -> Generator[Request, Any, Choice]:  # fmt: skip
    """Aggregate the candidates and let the evaluators measure what they would be served.

    A single candidate is taken without measuring. What they measure is the model ``before`` the round, moved by the
    aggregate as the server does.
    """
    asked, means, _ = yield from aggregate_candidates(plan, rule, sent, offers, log)
    candidates, best = asked.candidates, 0
    measures: list[Measures] = []
    if len(candidates) > 1:
        models = [before.step(mean, plan.server).weights for mean in means[: len(candidates)]]
        for_ledger = plan.ledger is not None and plan.ledger.calibrated  # so that it need not measure them again
        asked_of = tuple((model, tuple(evaluators)) for model in models)
        tempered = rule.calibrated or for_ledger
        answers = yield Evaluate(asked_of, plan.evaluate_on, tempered=tempered, quick=not rule.calibrated)
        log.sent_down(len(models) * len(evaluators))
        # An evaluator that stopped answering must not favour one candidate: those that measured all count.
        complete = [k for k in evaluators if all(k in of_model for of_model in answers)]
        measures = [{k: of_model[k] for k in complete} for of_model in answers]
        best, log.tried = _best(rule, log.roster, candidates, measures)
    training = best if asked.training is None else asked.training
    priority_only = next((i for i, one in enumerate(candidates) if not one.clients), None)
    # The optimiser's memory, as large as the model or twice that, is kept for these alone.
    kept = {best, training} | ({priority_only} if priority_only is not None else set())
    options = {
        i: Option(
            before.step(means[i], plan.server),
            asked.mixes[i].shares,
            measures[i] if i < len(measures) else None,
        )
        for i in kept
    }
    usual = {
        frozenset(one.clients): of_model
        for one, of_model in zip(candidates, measures, strict=False)
        if not (one.weight or one.scale or one.step)
    }
    return Choice(options, best, training, priority_only, candidates[best], asked.training_reasons, usual)


def aggregate_candidates(
    plan: Plan, rule: AutoAlign, sent: Broadcast, offers: Offers, log: RoundLog
) -> Generator[Request, Any, tuple[Mixes, tuple[Model, ...], Offers]]:
    """Aggregate every candidate and the training model. Without updates that fail the server's checks, if some do.

    The last value are the offers that are left.
    """
    while True:
        asked = _mixes(rule, sent, offers, log)
        aggregated: Aggregated = yield Aggregate(tuple(asked.mixes), again=plan.ledger is not None)
        if not aggregated.refused:
            return asked, tuple(aggregated.models), offers
        log.refuse(aggregated.refused)
        offers = without(offers, aggregated.refused)


def _mixes(rule: AutoAlign, sent: Broadcast, offers: Offers, log: RoundLog) -> Mixes:
    candidates = [check_selection(rule, one, offers) for one in rule.candidates(offers, sent)]
    if not candidates:
        raise FedalignError(f"{type(rule).__name__} gave no candidate; candidates are sets of the clients that offer")
    mixes = [mix_of(log.present, log.trained, one) for one in candidates]
    reasons = rule.training_set(offers, sent)
    if reasons is None:
        return Mixes(candidates, mixes, None, {})
    check_selection(rule, Selection(tuple(reasons)), offers)
    own = Mix(shares(log.present, sorted([*log.trained, *reasons])))
    if own not in mixes:
        mixes.append(own)
    return Mixes(candidates, mixes, mixes.index(own), reasons)


def _best(
    rule: AutoAlign, roster: Roster, candidates: Sequence[Selection], measures: Sequence[Measures]
) -> tuple[int, tuple[Tried, ...]]:
    """Return the candidate that the rule chooses (without measures, the smallest), and all losses for the record."""
    mean = calibrated_mean if rule.calibrated else weighted_mean
    losses = [mean(roster, of_model)[0] if of_model else math.inf for of_model in measures]
    usable = [i for i, loss in enumerate(losses) if math.isfinite(loss)]
    if usable:
        p = {k: float(roster.p[k]) for k in measures[usable[0]]}
        if rule.calibrated:  # one temperature for all clients, so that their losses cannot be chosen by one at a time
            chosen = min(range(len(usable)), key=lambda i: (losses[usable[i]], len(candidates[usable[i]].clients)))
        else:
            chosen = rule.choose([candidates[i] for i in usable], [measures[i] for i in usable], p)
        if not 0 <= chosen < len(usable):
            raise FedalignError(f"{type(rule).__name__}.choose must return 0 to {len(usable) - 1}, not {chosen!r}")
        best = usable[chosen]
    else:
        best = min(range(len(candidates)), key=lambda i: len(candidates[i].clients))
    shown = [loss if math.isfinite(loss) else None for loss in losses]
    return best, tuple(Tried(one.epsilon, len(one.clients), shown[i], i == best) for i, one in enumerate(candidates))
