"""What each free client's update does to the priority clients' loss, measured by them, now and over the rounds."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median, quantiles
from typing import Any, TypeVar

from fedalign.protocol.aggregate import mix_of, shares, weighted_mean
from fedalign.protocol.calibration import calibrated_mean
from fedalign.protocol.candidates import Option
from fedalign.protocol.fallback import Mean
from fedalign.protocol.messages import Aggregate, Evaluate, Mix, Request
from fedalign.protocol.plan import Plan
from fedalign.protocol.roster import Roster
from fedalign.protocol.round_log import RoundLog
from fedalign.rules.rule import Offer, Selection
from fedalign.rules.verified import Verified
from fedalign.training.server import ServerModel

Key = TypeVar("Key")  # a client, or a pair of clients
_NEWEST = 0.1  # weight of a round in a client's reputation
_SHORTEST = 1e-6  # of the median length of the priority clients' updates
_ZERO = "its update is zero"
_OUTLIER = 3.0  # distances from the median to the lower quartile


@dataclass(frozen=True)
class Contributions:
    """What free clients' updates do to the priority clients' loss: relative changes, of which negative ones help.

    ``limit`` is the largest change when one of the priority clients is missing: as much as a trusted client matters.
    """

    changes: Mapping[int, float]
    limit: float

    def trusted(self, reputation: Mapping[int, float]) -> set[int]:
        """Return the clients to train on: no outliers, and none that harms more than a missing priority client.

        Neither this round's change nor the reputation may be an outlier.

        >>> changes = dict(enumerate((-0.03, -0.02, -0.02, -0.01, -0.01, 0.3)))
        >>> sorted(Contributions(changes, math.inf).trusted(changes))
        [0, 1, 2, 3, 4]
        """
        known = {k: reputation[k] for k in self.changes}
        now, past = min(self.limit, usual_limit(self.changes)), min(self.limit, usual_limit(known))
        return {k for k, change in self.changes.items() if change <= now and known[k] <= past}


def usual_limit(values: Mapping[int, float]) -> float:
    """Return where outliers begin: the median plus three times its distance to the lower quartile.

    As long as fewer than half of the clients are hostile, honest ones set both. Fewer than four values have no limit.

    >>> usual_limit({1: 0.0, 2: 1.0, 3: 2.0, 4: 3.0, 5: 90.0})
    5.0
    """
    if len(values) < 4:
        return math.inf
    lower, middle, _ = quantiles(values.values(), n=4, method="inclusive")
    return middle + _OUTLIER * (middle - lower)


@dataclass(frozen=True)
class Verification:
    """One round's means of verifying: the rule's bounds on free updates, and the evaluators to measure aggregates.

    ``proposed`` is the inner rule's selection: nobody else may join, and its weights count. ``probed`` are those that
    this round measures: all of them, or as many as the rule says, by turns.
    """

    plan: Plan
    rule: Verified
    log: RoundLog
    before: ServerModel
    evaluators: tuple[int, ...]
    proposed: Selection
    probed: tuple[int, ...]
    step: Mapping[int, float]

    @classmethod
    def of_round(
        cls, plan: Plan, log: RoundLog, before: ServerModel, evaluators: tuple[int, ...], proposed: Selection,
        offers: Mapping[int, Offer],
    ) -> Verification:  # fmt: skip
        """Bound the lengths of the proposed clients' updates by the median length of the priority clients'."""
        rule = plan.rule
        assert isinstance(rule, Verified)
        usual = median(log.similarities[k].length for k in log.trained)
        # A free rider's update is zero, or so short that stretching it would leave the range of its numbers.
        clients = tuple(k for k in proposed.clients if offers[k].length > _SHORTEST * usual)
        longest = {k: rule.length * usual / offers[k].length for k in clients}
        step = {k: min(proposed.step.get(k, 1.0), longest[k]) for k in clients}
        reasons = {**proposed.reasons, **{k: _ZERO for k in proposed.clients if k not in clients}}
        proposed = replace(proposed, clients=clients, reasons=reasons)
        return cls(plan, rule, log, before, evaluators, proposed, _turn(clients, rule.probes, log.round), step)

    def without(self, clients: Collection[int], why: str) -> Verification:
        """Return the verification without some clients, for a reason."""
        left = {k: why for k in self.probed if k in clients}
        proposed = replace(
            self.proposed,
            clients=tuple(k for k in self.proposed.clients if k not in left),
            reasons={**self.proposed.reasons, **left},
        )
        return replace(self, proposed=proposed, probed=tuple(k for k in self.probed if k not in left))

    @cached_property
    def _capped(self) -> Roster:
        """The roster with the rule's bounds on the weights of free clients: nobody can check their sample counts."""
        roster = self.log.roster
        each = self.rule.each / sum(roster.priority)
        total = min(roster.free_total, self.rule.total)
        return replace(roster, free_cap=min(roster.free_cap, each), free_total=total)

    def mix(self, clients: Iterable[int], weight: Mapping[int, float] | None = None) -> Mix:
        """Describe the aggregate of the priority clients and some free clients, within the rule's bounds."""
        chosen = tuple(sorted(clients))
        selection = Selection(
            chosen,
            weight={k: w for k, w in (self.proposed.weight if weight is None else weight).items() if k in chosen},
            scale={k: s for k, s in self.proposed.scale.items() if k in chosen and weight is None},
        )
        mix = mix_of(replace(self.log.present, roster=self._capped), self.log.trained, selection)
        if not chosen:
            return mix
        step = {k: self.step[k] for k in chosen}
        return Mix(mix.shares, step, tuple(sorted(self.log.trained)), self.rule.within)

    def measure(self, mixes: Sequence[Mix], again: bool = False) -> Generator[Request, Any, list[Option]]:
        """Aggregate mixes, and let the evaluators measure the models that the server would move to.

        Evaluators that did not measure every model are left out, so that none is favoured. ``again`` announces more
        aggregates of the same updates.
        """
        aggregated = yield Aggregate(tuple(mixes), again)
        self.log.refuse(aggregated.refused)  # updates were checked when they were compared: training has diverged
        servers = [self.before.step(mean, self.plan.server) for mean in aggregated.models]
        asked = tuple((server.weights, self.evaluators) for server in servers)
        answers = yield Evaluate(asked, self.plan.evaluate_on, tempered=self.rule.calibrated)
        self.log.sent_down(len(servers) * len(self.evaluators))
        complete = [k for k in self.evaluators if all(k in of_model for of_model in answers)]
        kept = [{k: of_model[k] for k in complete} for of_model in answers]
        return [
            Option(server, mix.shares, measures) for server, mix, measures in zip(servers, mixes, kept, strict=True)
        ]

    def loss(self, option: Option) -> float:
        """Return the evaluators' mean loss of a measured model, by which models are compared.

        It is the loss at the best temperature, unless the rule compares plain losses; infinity where it is not finite
        or nobody answered.
        """
        return self._mean_loss(option, calibrated_mean if self.rule.calibrated else weighted_mean)

    def plain_loss(self, option: Option) -> float:
        """Return the evaluators' mean loss of a measured model without a temperature."""
        return self._mean_loss(option, weighted_mean)

    def _mean_loss(self, option: Option, mean: Mean) -> float:
        loss = mean(self.log.roster, option.measures)[0] if option.measures else math.inf
        return loss if math.isfinite(loss) else math.inf

    def contributions(self) -> Generator[Request, Any, Contributions]:
        """Measure the priority clients' aggregate with and without each free client, and without each of their own.

        All probed clients have the same weight, whatever sample counts they claim. If no evaluator answers, no
        contribution is known.
        """
        probed = self.probed
        if not probed:
            return Contributions({}, 0.0)
        trained = self.log.trained
        alike = 1 / len(trained)
        others = [[j for j in trained if j != k] for k in trained] if len(trained) > 1 else []
        mixes = [
            self.mix(()),
            *(Mix(shares(self.log.present, some)) for some in others),
            *(self.mix((k,), {k: alike}) for k in probed),
        ]
        measured = yield from self.measure(mixes, again=True)
        if not measured[0].measures:
            return Contributions({}, 0.0)
        alone, *changed = [self.loss(one) for one in measured]
        changes = [_change(loss, alone) for loss in changed]
        limit = max(0.0, *changes[: len(others)]) if others else math.inf
        return Contributions(dict(zip(probed, changes[len(others) :], strict=True)), limit)


def reputations(before: Mapping[Key, float], now: Mapping[Key, float]) -> dict[Key, float]:
    """Average contributions over the rounds; clients that were not measured keep their reputation.

    >>> reputations({3: -0.1, 5: 0.4}, {3: 0.1})
    {3: -0.08, 5: 0.4}
    """
    new = {k: change if k not in before else _smooth(before[k], change) for k, change in now.items()}
    return {**before, **new}


def order(now: Mapping[int, float], reputation: Mapping[int, float]) -> list[int]:
    """Order clients by their contribution now or their reputation, whichever is worse: a good past is no credit.

    >>> order({3: -0.2, 4: -0.1, 5: 0.3}, {3: 0.1, 4: -0.1, 5: -0.5})
    [4, 3, 5]
    """
    return sorted(now, key=lambda k: (max(now[k], reputation[k]), now[k], k))


def _smooth(before: float, now: float) -> float:
    return round((1 - _NEWEST) * before + _NEWEST * now, 12)


def _turn(clients: Sequence[int], most: int, round: int) -> tuple[int, ...]:
    """Return the clients to measure in a round: all of them, or ``most``, so that all have their turn."""
    ordered = sorted(clients)  # a rule's order may follow what clients report
    if len(ordered) <= most:
        return tuple(ordered)
    start = round * most % len(ordered)
    return tuple(sorted([*ordered, *ordered][start : start + most]))


def _change(loss: float, alone: float) -> float:
    """Return a relative change of the loss, between −1 and 1; what is not finite counts as the worst."""
    if not math.isfinite(loss):
        return 1.0
    return max(-1.0, min(1.0, (loss - alone) / max(abs(alone), 1e-12)))
