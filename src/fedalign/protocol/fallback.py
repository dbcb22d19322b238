"""The way back: FedAvg on the priority clients, trained beside a rule's base from where the two begin to differ.

In every round the choice is no worse on held-out data than the priority clients' own aggregate of that round. That is
no promise for the run: free clients may lower this round's loss and undo what later rounds would have built on. So the
priority clients also go on alone, with a model of their own, and both that model and the choice are measured on their
held-out data. While the choice is behind (accuracy smoothed over some ten rounds; without classes, loss), they are
served their own model. The base goes on all the same: what it is good for may show later.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedalign.protocol.choice import Choice, Mean
from fedalign.protocol.messages import Combine, Evaluate, Model, Request, Train, Update
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import Fallback
from fedalign.protocol.roster import Roster
from fedalign.protocol.shares import shares_of, weighted
from fedalign.protocol.state import Costs, State
from fedalign.rules.align import PriorityOnly
from fedalign.rules.rule import Broadcast, Measure, Split
from fedalign.training.participation import Presence
from fedalign.training.server import Branch

SMOOTHING = 0.1  #: a new round's part in the smoothed deficit
MARGIN = 0.005  #: the smoothed deficit, in accuracy (or as a part of the loss), from which on a choice is behind


def settle(
    plan: Plan,
    presence: Presence,
    state: State,
    choice: Choice,
    clients: tuple[int, ...],
    judges: tuple[int, ...],
    broadcast: Broadcast,
    costs: Costs,
) -> Generator[Request, Any, tuple[State, Choice]]:
    """Move to what was chosen, or serve the priority clients' own model."""
    base, served, own = choice.base.branch, choice.served, choice.alone
    if not plan.rule.fallback or (state.alone is None and (own is None or choice.base is own)):
        return State(served.branch.model, base, None, state.fallback), choice
    if state.alone is not None:
        alone, trained = yield from _go_on_alone(plan, presence, state.alone, clients, broadcast)
        costs.down += len(clients)
        costs.sent(trained)
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
    return State(choice.served.branch.model, base, own.branch, fallback), choice


def _go_on_alone(
    plan: Plan, presence: Presence, branch: Branch, clients: Sequence[int], broadcast: Broadcast
) -> Generator[Request, Any, tuple[Branch, tuple[int, ...]]]:
    """Do a round of FedAvg on the priority clients with a model of their own; tell who sent an update.

    Where that fails, the model stays as it is.
    """
    jobs = tuple((branch.model, k) for k in clients)
    replies = yield Train(jobs, broadcast.round, broadcast, PriorityOnly(), plan.match_on)
    updates = {k: reply for k, reply in zip(clients, replies, strict=True) if isinstance(reply, Update)}
    sent = tuple(updates)
    if not sent or not all(reply.finite for reply in updates.values()):
        return branch, sent
    combined = yield Combine((shares_of(plan.roster, presence, sent),))
    return (branch if combined.not_finite else branch.step(combined.models[0], plan.server)), sent


def measure(
    models: Sequence[Model], clients: Sequence[int], split: Split
) -> Generator[Request, Any, list[dict[int, Measure]]]:
    """Let clients measure models; for each model, the measures of those that answer."""
    jobs = tuple((model, k) for model in models for k in clients)
    answers = iter((yield Evaluate(jobs, split)) if jobs else ())
    return [{k: m for k in clients if (m := next(answers)) is not None} for _ in models]


def judge(roster: Roster, before: Fallback, chosen: Mapping[int, Measure], alone: Mapping[int, Measure]) -> Fallback:
    """Compare both models on the held-out data of those that measured both.

    >>> roster, one = Roster(("a",), (True,), (10,)), {0: Measure(1.0, 0.6, 10)}
    >>> judge(roster, Fallback(apart=True), one, {0: Measure(1.0, 0.7, 10)}).behind
    True
    """
    both = [k for k in chosen if k in alone]
    if not both:
        return replace(before, apart=True)
    loss, accuracy = weighted(roster, {k: chosen[k] for k in both})
    loss_alone, accuracy_alone = weighted(roster, {k: alone[k] for k in both})
    if not math.isfinite(loss) or not math.isfinite(loss_alone):
        # Not smoothed: an infinity would never pass.
        return Fallback(True, loss_alone, accuracy_alone, before.deficit, behind=math.isfinite(loss_alone))
    if accuracy is not None and accuracy_alone is not None:
        now = accuracy_alone - accuracy
    else:
        now = (loss - loss_alone) / max(abs(loss), abs(loss_alone), 1e-12)  # of the larger one: at most 1 either way
    deficit = (1 - SMOOTHING) * before.deficit + SMOOTHING * now
    return Fallback(True, loss_alone, accuracy_alone, deficit, deficit > MARGIN)
