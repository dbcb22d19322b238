"""Values the clients of a round by what their updates do to the priority clients' held-out loss.

Priority clients come first, always: they are valued by what their aggregate gains over the received model, and free
clients by what they add to that aggregate. So all values of a round add up to what its aggregate gains. These are
Shapley values under a precedence constraint (Faigle and Kern, 1992). Only what priority clients measure counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedalign.ledger.ledger import Ledger
from fedalign.ledger.valuation import Coalition, Estimates, Game, Valuation, check_coalitions, checked
from fedalign.protocol.aggregate import mix_of, shares, weighted_mean
from fedalign.protocol.calibration import has_temperatures, loss_at, softening
from fedalign.protocol.copies import find_copies
from fedalign.protocol.ledger_values import ClientValue, RoundValues
from fedalign.protocol.messages import Aggregate, Evaluate, Measures, Mix, Model, Request, Snapshot, WhoIsThere
from fedalign.protocol.plan import Plan
from fedalign.protocol.round_log import RoundLog
from fedalign.rules.rule import Selection
from fedalign.training.server import ServerModel

Known = Mapping[frozenset[int], Measures]
_AT_ONCE = 64  # models that are made and measured at a time; all of them are held in memory
_WORST = 10.0  # a loss that is higher than the received model's by more than so many times counts as that


@dataclass
class Bench:
    """Measures the models of coalitions, each once; a coalition is the set of all clients in its aggregate.

    ``mix`` describes the aggregate of the priority clients and some free ones. The empty set is the received model.
    """

    plan: Plan
    ledger: Ledger
    log: RoundLog
    before: ServerModel
    evaluators: tuple[int, ...]
    mix: Callable[[Collection[int]], Mix]
    measures: dict[frozenset[int], Measures] = field(default_factory=dict)
    models: int = 0
    _means: dict[frozenset[int], float] = field(default_factory=dict)  # of the evaluators in _counted
    _counted: list[int] = field(default_factory=list)
    _place: int | None = None  # of the temperature at which _counted's losses are compared; None: plain losses

    @property
    def priority(self) -> frozenset[int]:
        """The priority clients that sent an update."""
        return frozenset(self.log.trained)

    def measure(self, wanted: Iterable[frozenset[int]]) -> Generator[Request, Any, None]:
        """Let the evaluators measure the models that the server would move to, unless they have done so."""
        new = [one for one in dict.fromkeys(wanted) if one not in self.measures]
        for start in range(0, len(new), _AT_ONCE):
            some = new[start : start + _AT_ONCE]
            mixes = [self._mix(one) for one in some if one]
            models: list[Model] = [self.before.weights] if not all(some) else []
            if mixes:
                aggregated = yield Aggregate(tuple(mixes), again=True)
                self.log.refuse(aggregated.refused)  # updates were checked when they were compared
                models += [self.before.step(mean, self.plan.server).weights for mean in aggregated.models]
            asked = tuple((model, self.evaluators) for model in models)
            answers = yield Evaluate(asked, self.plan.evaluate_on, tempered=self.ledger.calibrated, quick=True)
            self.log.sent_down(len(models) * len(self.evaluators))
            self.models += len(models)
            ordered = [one for one in some if not one] + [one for one in some if one]
            self.measures |= zip(ordered, answers, strict=True)

    def _mix(self, clients: frozenset[int]) -> Mix:
        if self.priority <= clients:
            return self.mix(clients - self.priority)
        return Mix(shares(self.log.present, sorted(clients)))

    @property
    def complete(self) -> list[int]:
        """The evaluators that measured every model; the others must not favour one."""
        return [k for k in self.evaluators if all(k in of_model for of_model in self.measures.values())]

    def losses(self) -> dict[frozenset[int], float]:
        """Return the evaluators' mean loss of every model; NaN if none measured all of them.

        All models are judged at one temperature, the best one of the priority clients' own aggregate, or at 1 if that
        is below 1. Free clients cannot choose it, and none is credited for how confident a model is. What is not
        finite, or far worse than the received model, counts as a bound: one client that breaks a model shall not decide
        the values of the others.
        """
        complete = self.complete
        if not complete:
            return dict.fromkeys(self.measures, math.nan)
        if complete != self._counted:
            self._counted, self._means = complete, {}
            own = {k: self.measures[self.priority][k] for k in complete}
            self._place = softening(self.log.roster, own) if self.ledger.calibrated else None
        for one, of_model in self.measures.items():
            if one not in self._means:
                self._means[one] = self._mean({k: of_model[k] for k in complete})
        start = self._means[frozenset()]
        worst = start + _WORST * max(1.0, abs(start))
        return {one: min(loss, worst) if not math.isnan(loss) else worst for one, loss in self._means.items()}

    def _mean(self, measures: Measures) -> float:
        """Return the mean loss at the round's temperature; the plain one where clients have no others."""
        if self._place is None or not has_temperatures(measures):
            return weighted_mean(self.log.roster, measures)[0]
        return loss_at(self.log.roster, measures, self._place)


def value_round(
    plan: Plan, log: RoundLog, before: ServerModel, evaluators: tuple[int, ...], free: Collection[int],
    mix: Callable[[Collection[int]], Mix], known: Known | None = None,
) -> Generator[Request, Any, None]:  # fmt: skip
    """Value the priority clients that trained and the free clients whose updates are used, and note it in the log.

    The driver must still hold the updates. ``mix`` describes the aggregate of the priority clients and some free ones,
    ``known`` has measures of such aggregates by their free clients.
    """
    ledger = plan.ledger
    assert ledger is not None
    copies = yield from find_copies(log, free, ledger.copies, log.previous)
    bench = Bench(plan, ledger, log, before, evaluators, mix)
    priority = bench.priority
    bench.measures |= {priority | clients: measures for clients, measures in (known or {}).items()}
    weights = mix(free).shares

    # Copies of each other are one player: as several, they would join a coalition earlier and be worth more together.
    players = tuple(sorted({*copies.first.values()}))

    def counted(clients: Coalition) -> frozenset[int]:
        members = [k for player in clients for k in copies.group(player)]
        return priority | copies.counted(members, weights)

    whole = counted(frozenset(players))
    yield from bench.measure([frozenset(), priority, whole])
    games = [(Game(players, seed=plan.seed, round=log.round), priority, counted)]
    if ledger.priority:
        own = Game(tuple(sorted(priority)), seed=plan.seed, round=log.round, part=1)
        games.append((own, frozenset(), lambda clients: clients))
    values: dict[int, ClientValue] = {k: ClientValue(k, 0.0, 0.0, 0.0) for k in copies.of_trusted}
    notes: list[str] = []
    for game, base, key in games:
        most = ledger.valuation.most_players()
        if most is not None and len(game.players) > most:
            notes.append(f"{ledger.method_name} values at most {most} clients, and there are {len(game.players)}")
            values |= {k: ClientValue(k, None) for k in game.players}
            continue
        scaled = replace(game, scale=max(abs(bench.losses()[base]), 1e-12))
        found = yield from _estimated(ledger.valuation, scaled, bench, base, key)
        values |= {k: _value(k, one.value, one.low, one.high) for k, one in found.items()}
    values |= {k: _part(values[first], k, len(copies.group(k))) for k, first in copies.first.items()}
    if not bench.complete:
        notes.append("no priority client measured all models")
    values |= {k: replace(one, copies=copies.words(k, log.roster)) for k, one in values.items() if k not in priority}
    losses = bench.losses()
    log.ledger = RoundValues(
        ledger.method_name,
        _finite(losses[frozenset()]),
        _finite(losses[frozenset()] - losses[whole]),
        _finite(losses[priority] - losses[whole]),
        bench.models,
        "; ".join(notes),
        tuple(values[k] for k in sorted(values)),
    )


def value_selection(
    plan: Plan, log: RoundLog, before: ServerModel, selection: Selection
) -> Generator[Request, Any, None]:
    """Value the clients of a round with one aggregate, whose free clients a rule has selected."""
    drawn = yield WhoIsThere(log.round, "evaluate")
    evaluators = (drawn.priority if drawn is not None else ()) or tuple(k for k in log.measures if k in log.trained)
    yield from value_round(
        plan,
        log,
        before,
        evaluators,
        selection.clients,
        lambda some: mix_of(log.present, log.trained, restricted(selection, some)),
    )


def restricted(selection: Selection, clients: Collection[int]) -> Selection:
    """Return a selection of some of its clients, with their weights.

    >>> restricted(Selection((3, 5), weight={3: 0.1, 5: 0.2}), {5})
    Selection(clients=(5,), weight={5: 0.2}, scale={}, step={}, reasons={}, epsilon=None)
    """
    weight, scale, step = (
        {k: value for k, value in of.items() if k in clients}
        for of in (selection.weight, selection.scale, selection.step)
    )
    return Selection(tuple(k for k in selection.clients if k in clients), weight, scale, step)


def plain_mix(log: RoundLog, clients: Collection[int]) -> Mix:
    """Describe the aggregate of the priority clients and some free ones, with the weights of the roster."""
    return mix_of(log.present, log.trained, Selection(tuple(sorted(clients))))


def with_previous(plan: Plan, snapshot: Snapshot, received: Model) -> Snapshot:
    """Add the model that a round started from, which tells copies of the server's step in the next one."""
    if plan.ledger is None:
        return snapshot
    return replace(snapshot, tensors={**snapshot.tensors, "previous": received})


def _estimated(
    method: Valuation, game: Game, bench: Bench, base: frozenset[int], key: Callable[[Coalition], frozenset[int]]
) -> Generator[Request, Any, Estimates]:
    """Answer a method's questions; ``key`` tells which clients' updates make up a coalition's model."""
    asking, asked = method.estimate(game), {frozenset[int]()}
    try:
        wanted = check_coalitions(method, game, next(asking))
        while True:
            asked |= set(wanted)
            yield from bench.measure(base | key(one) for one in wanted)
            losses = bench.losses()
            gains = {one: losses[base] - losses[base | key(one)] for one in asked}
            wanted = check_coalitions(method, game, asking.send(gains))
    except StopIteration as end:
        return checked(method, game, end.value)


def _part(whole: ClientValue, k: int, members: int) -> ClientValue:
    """Return the equal part that a client has in the value of copies."""
    gave, low, high = (None if one is None else one / members for one in (whole.gave, whole.low, whole.high))
    return ClientValue(k, gave, low, high)


def _value(k: int, value: float, low: float, high: float) -> ClientValue:
    return ClientValue(k, _finite(value), _finite(low), _finite(high))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
