"""Weights: each client's share of an aggregate, and weighted means of the priority clients' measures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from fedalign.errors import FedalignError
from fedalign.protocol.messages import Mix, Present
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Measure, Offer, Rule, Selection


def mix_of(present: Present, priority: Iterable[int], selection: Selection) -> Mix:
    """Describe the aggregate over priority clients and a selection of free clients."""
    return Mix(shares(present, sorted([*priority, *selection.clients]), selection), selection.step)


def shares(present: Present, clients: Iterable[int], selection: Selection | None = None) -> dict[int, float]:
    """Return each client's share: its weight ``p_k`` over the sum of weights.

    A priority client that was drawn ``c`` times of ``K`` weighs ``c/K`` in place of ``p_k``. A selection may replace
    or scale the weights of its clients. The roster's caps hold whatever the selection says.

    >>> present = Present(Roster(("a", "b", "c"), (True, True, False), (3, 1, 4)), (True, True, True))
    >>> shares(present, [0, 1, 2])
    {0: 0.375, 1: 0.125, 2: 0.5}
    """
    roster, draws = present.roster, present.draws
    total_draws = sum(draws.values()) if draws else 0
    weights = {k: draws[k] / total_draws if draws and roster.priority[k] else float(roster.p[k]) for k in clients}
    if selection is not None and (selection.weight or selection.scale):
        # A selection's weights stand beside a weight of 1 for all priority clients, of which some may be absent.
        here = math.fsum(weight for k, weight in weights.items() if roster.priority[k])
        weights |= {k: weight * here for k, weight in selection.weight.items()}
        weights = {k: weight * selection.scale.get(k, 1.0) for k, weight in weights.items()}
        weights = _each_capped(weights, roster, here)  # a client's word about its loss must not lift the cap
    weights = _capped(weights, roster)
    total = math.fsum(weights.values())
    return {k: weight / total for k, weight in weights.items()}


def capped(weights: dict[int, float], roster: Roster) -> dict[int, float]:
    """Limit the free clients' weights by the roster's caps, relative to the weight of the priority clients among them.

    >>> roster = Roster(("a", "b"), (True, False), (1, 1), free_cap=0.5)
    >>> capped({0: 1.0, 1: 3.0}, roster)
    {0: 1.0, 1: 0.5}
    """
    here = math.fsum(weight for k, weight in weights.items() if roster.priority[k])
    return _capped(_each_capped(weights, roster, here), roster)


def _each_capped(weights: dict[int, float], roster: Roster, here: float) -> dict[int, float]:
    """Limit the weight of each free client; ``here`` is that of the priority clients."""
    if roster.free_cap == math.inf:
        return weights
    return {k: w if roster.priority[k] else min(w, roster.free_cap * here) for k, w in weights.items()}


def _capped(weights: dict[int, float], roster: Roster) -> dict[int, float]:
    """Scale the free clients' weights down, in proportion, to the roster's cap on all of them together."""
    if roster.free_total == math.inf:
        return weights
    here = math.fsum(weight for k, weight in weights.items() if roster.priority[k])
    free = math.fsum(weight for k, weight in weights.items() if not roster.priority[k])
    if free <= roster.free_total * here:
        return weights
    factor = roster.free_total * here / free
    return {k: weight if roster.priority[k] else weight * factor for k, weight in weights.items()}


def weighted_mean(roster: Roster, measures: Mapping[int, Measure]) -> tuple[float, float | None]:
    """Average loss and accuracy over clients with weights ``p_k``; no accuracy where a client has none.

    >>> roster = Roster(("a", "b"), (True, True), (3, 1))
    >>> weighted_mean(roster, {0: Measure(1.0, 0.5, 9), 1: Measure(2.0, 0.9, 9)})
    (1.25, 0.6)
    """
    total = math.fsum(float(roster.p[k]) for k in measures)
    loss = math.fsum(float(roster.p[k]) * m.loss for k, m in measures.items()) / total
    accuracies = [(float(roster.p[k]), m.accuracy) for k, m in measures.items() if m.accuracy is not None]
    if len(accuracies) < len(measures):
        return loss, None
    return loss, math.fsum(p * a for p, a in accuracies) / total


def check_selection(rule: Rule, selection: Selection, offers: Mapping[int, Offer]) -> Selection:
    """Return a rule's selection in plain Python numbers, or refuse one that makes no sense.

    Only clients that offered may be selected, and only selected ones may have a weight, a scale or a step: finite
    numbers, none negative.
    """
    name = type(rule).__name__
    if not isinstance(selection, Selection):
        raise FedalignError(f"{name}.select must return a fedalign.Selection, not {selection!r:.60}")
    try:
        clients = tuple(dict.fromkeys(int(k) for k in selection.clients))
        factors = {
            what: {int(k): float(value) for k, value in getattr(selection, what).items()}
            for what in ("weight", "scale", "step")
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise FedalignError(f"{name} gave a selection that cannot be read: {error}") from error
    for k in clients:
        if k not in offers:
            raise FedalignError(f"{name} names client {k}, which offered nothing; it selects among the offers")
    for what, values in factors.items():
        for k, value in values.items():
            if k not in clients:
                raise FedalignError(f"{name} gives a {what} to client {k}, which it does not select")
            if not 0 <= value < math.inf:
                raise FedalignError(
                    f"{name} gives client {k} the {what} {value}; it must be a finite number, 0 or more"
                )
    weight, scale, step = (factors[what] for what in ("weight", "scale", "step"))
    return replace(selection, clients=clients, weight=weight, scale=scale, step=step)
