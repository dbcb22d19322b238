"""Verified rounds: priority clients are the root of trust, and measure everything that free clients would change.

A round begins as FedALIGN's does. The rule proposes free clients, whose updates the server bounds (length, every
coordinate, statistics of BatchNorm, total weight). The priority clients measure what each of them contributes
(``contributions.py``), then the aggregates of the best ones. Clients whose updates are too much alike take no part
(``resemblance.py``). The best aggregate is the **served model**, the largest
harmless one the **training model** of the next round. FedAvg on the priority clients is trained beside it and is served
whenever the choice is not better (``fallback.py``). So a free client can help, and cannot harm beyond the noise of the
held-out data, whatever it sends and reports.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedalign.errors import DivergedError
from fedalign.protocol.aggregate import check_selection
from fedalign.protocol.autoalign import AutoState, compare_with_priority_only, train_priority_only
from fedalign.protocol.candidates import Choice, Option
from fedalign.protocol.contributions import Contributions, Verification, order, reputations
from fedalign.protocol.fedalign import Offers, broadcast, invite
from fedalign.protocol.head_start import FIRST, LEAST, averaged
from fedalign.protocol.messages import Request, Result, RoundDone, Run, Snapshot, WhoIsThere
from fedalign.protocol.plan import Plan
from fedalign.protocol.promise import compare_served
from fedalign.protocol.records import Fallback, History, Promise, Tried
from fedalign.protocol.resemblance import without_colluders
from fedalign.protocol.round_log import RoundLog
from fedalign.protocol.scores import scores
from fedalign.protocol.valuing import value_round, with_previous
from fedalign.rules.auto import sizes
from fedalign.rules.rule import Broadcast, Selection

_EXCLUDED = "the priority clients are better off alone"
_NOT_MEASURED = "not measured in this round"
_FAR_BEHIND = 0.02  # of the loss: training begins again from the priority-only model
_GROWTH = 1.05  # of the breadth, in every round that is not behind


@dataclass(frozen=True)
class VerifiedState:
    """What a round passes to the next: the models, what is known of the clients, and the breadth of the training set.

    ``reputation`` holds clients' contributions, ``resemblance`` the cosines of every two clients' updates. Both are
    averages over the rounds.
    ``breadth`` is the part of the measured clients, best first, that may be trained on. It is halved whenever the
    choice falls behind the priority-only model. ``head_start`` is what earlier training on free clients is worth: by
    which part the priority clients' own aggregate has a lower loss than the priority-only model, averaged over rounds.
    """

    models: AutoState
    reputation: Mapping[int, float] = field(default_factory=dict)
    resemblance: Mapping[tuple[int, int], float] = field(default_factory=dict)
    breadth: float = 1.0
    head_start: float = FIRST
    promise: Promise = field(default_factory=Promise)

    def snapshot(self, round: int, theta: float) -> Snapshot:
        """Return the state as named tensors and values, for a resume."""
        saved = self.models.snapshot(round, theta)
        own = {
            "reputation": {str(k): value for k, value in self.reputation.items()},
            "resemblance": [[*pair, cosine] for pair, cosine in self.resemblance.items()],
            "breadth": self.breadth,
            "head_start": self.head_start,
            "promise": asdict(self.promise),
        }
        return replace(saved, values={**saved.values, **own})

    @classmethod
    def restore(cls, snapshot: Snapshot) -> VerifiedState:
        """Read a snapshot; that of a new run holds the initial ``model`` alone."""
        values = snapshot.values
        reputation = {int(k): value for k, value in values.get("reputation", {}).items()}
        resemblance = {(i, j): cosine for i, j, cosine in values.get("resemblance", ())}
        promise = Promise(**values.get("promise", {}))
        breadth, head_start = values.get("breadth", 1.0), values.get("head_start", FIRST)
        return cls(AutoState.restore(snapshot), reputation, resemblance, breadth, head_start, promise)


def verified(plan: Plan, snapshot: Snapshot) -> Run:
    """Run verified rounds from a snapshot to the last one."""
    history, state = History(), VerifiedState.restore(snapshot)
    theta, previous = snapshot.values.get("theta", 0.0), snapshot.tensors.get("previous")
    for t in range(snapshot.round, plan.rounds):
        log, previous = RoundLog(plan, t, previous), state.models.training.weights
        state = yield from verified_round(plan, t, state, log)
        models = state.models
        measured = yield from scores(plan, log.roster, models.served, models.training.weights)
        theta = (t * theta + log.inclusion) / (t + 1)
        shown = None if models.fallback == Fallback() else models.fallback
        record = log.record(measured, theta, shown, separate_training=models.separate)
        yield RoundDone(record, models.served, with_previous(plan, state.snapshot(t + 1, theta), previous))
        history.rounds.append(record)
    return Result(state.models.served, history)


def verified_round(plan: Plan, t: int, state: VerifiedState, log: RoundLog) -> Generator[Request, Any, VerifiedState]:
    """Run round t. If training diverges, begin again from the priority-only model."""
    log.present = yield WhoIsThere(t)
    try:
        return (yield from _attempt(plan, t, state, log))
    except DivergedError:
        if state.models.priority_only is None:
            raise
    log.restart()
    return (yield from _attempt(plan, t, _restarted(state), log))


def _attempt(plan: Plan, t: int, state: VerifiedState, log: RoundLog) -> Generator[Request, Any, VerifiedState]:
    models = state.models
    sent = yield from broadcast(plan, t, models.training.weights, log)
    if sent is None:
        return state
    answered = tuple(log.measures)
    beside = None if models.priority_only is None else models.priority_only.weights
    offers = yield from invite(plan, models.training.weights, sent, log, beside)
    if not log.trained:
        return state
    drawn = yield WhoIsThere(t, "evaluate")
    evaluators = (drawn.priority if drawn is not None else ()) or answered
    proposed = check_selection(plan.rule, plan.rule.select(offers, sent), offers)
    verification = Verification.of_round(plan, log, models.training, evaluators, proposed, offers)
    verification, alike = yield from without_colluders(verification, state.resemblance)
    found = yield from verification.contributions()
    now, reputation = found.changes, reputations(state.reputation, found.changes)
    choice = yield from _choose(verification, found, reputation, state.breadth, offers, sent)
    if plan.ledger is not None:  # before the priority-only model is trained: updates are held until then
        free = choice.free_clients(log.roster)
        yield from value_round(plan, log, models.training, evaluators, free, verification.mix, choice.measured)
    new = replace(
        state,
        models=_models(models, choice),
        reputation=reputation,
        resemblance=reputations(state.resemblance, alike),
    )
    promises = verification.rule.promise and plan.evaluate_on == "heldout"  # samples trained on promise nothing
    served = own = choice.options[choice.served]
    training = choice.options[choice.training]
    if models.priority_only is not None or choice.served or choice.training:
        own = yield from train_priority_only(plan, models, choice, answered, sent, log)
        fallback = yield from compare_with_priority_only(
            plan, models, choice, own, evaluators, log, credit=False, promise=promises,
            calibrated=verification.rule.calibrated,
        )  # fmt: skip
        before = verification.loss(choice.options[0]) if models.priority_only is not None else None
        new = _after_comparison(new, own, fallback, verification.loss(served), before)
        if fallback.behind:
            choice = replace(
                choice, selection=replace(choice.selection, reasons=_reasons(verification, now, served.shares))
            )
            served = own
        if new.models.priority_only is None:
            training = own  # training begins again from it
    log.admitted(choice.selection, served.shares, (training.shares, choice.training_reasons))
    if not promises:
        return new
    both = served.server.weights, own.server.weights
    log.promise = yield from compare_served(
        t, state.promise, *both, evaluators, plan.evaluate_on, choices=max(1, len(log.tried)),
        lasting=2 ** len(now) + 1,  # who is trained on, or a new start
        rounds=plan.rounds,
    )  # fmt: skip
    return replace(new, promise=log.promise)


def _choose(
    verification: Verification, found: Contributions, reputation: Mapping[int, float], breadth: float,
    offers: Offers, sent: Broadcast,
) -> Generator[Request, Any, Choice]:  # fmt: skip
    """Measure the aggregates of the best clients, and choose the one to serve and the one to train on."""
    rule, log = verification.rule, verification.log
    best_first = order(found.changes, reputation)
    sets = [(), *(tuple(sorted(best_first[:size])) for size in sizes(len(best_first)))]
    trusted = found.trusted(reputation).intersection(best_first[: math.ceil(breadth * len(best_first))])
    broad = tuple(sorted(k for k in trusted if offers[k].cosine >= rule.cosine))
    if broad not in sets:
        sets.append(broad)
    ledger = verification.plan.ledger
    mixes = [verification.mix(clients) for clients in sets]
    measured = yield from verification.measure(mixes, again=ledger is not None)
    losses = [verification.loss(one) for one in measured]
    served = min(range(len(sets)), key=lambda i: (losses[i], len(sets[i])))
    plain = [verification.plain_loss(one) for one in measured]  # in the unit of the received model's loss
    limit = _above(max(sent.loss, plain[served]), rule.tolerance)
    harmless = [loss <= limit < math.inf for loss in plain]  # an infinite limit: nobody measured anything
    training = _largest(sets, [ok and set(broad).issuperset(one) for one, ok in zip(sets, harmless, strict=True)])
    log.tried = tuple(
        Tried(None, len(clients), loss if math.isfinite(loss) else None, i == served)
        for i, (clients, loss) in enumerate(zip(sets, losses, strict=True))
    )
    options = {i: measured[i] for i in {0, served, training}}
    reasons = _reasons(verification, found.changes)
    alike = ledger is not None and (rule.calibrated or not ledger.calibrated)  # else its losses are other ones
    known = {frozenset(sets[i]): dict(one.measures) for i, one in enumerate(measured) if alike and one.measures}
    return Choice(options, served, training, 0, Selection(sets[served], reasons=reasons), reasons, known)


def _above(loss: float, part: float) -> float:
    """Return a loss that is worse by a part of its size; a loss of the user's own may be negative."""
    return loss + part * abs(loss)


def _largest(sets: Sequence[tuple[int, ...]], allowed: Sequence[bool]) -> int:
    """Return the index of the largest allowed set; without one, that of the empty set, which is the first."""
    return max((i for i, ok in enumerate(allowed) if ok), key=lambda i: len(sets[i]), default=0)


def _models(before: AutoState, choice: Choice) -> AutoState:
    served, training = choice.options[choice.served], choice.options[choice.training]
    fallback = Fallback(deficit=before.fallback.deficit)  # nothing is compared yet in this round
    return AutoState(served.server.weights, training.server, choice.training != choice.served, None, fallback)


def _after_comparison(
    state: VerifiedState, own: Option, fallback: Fallback, loss: float, without_free: float | None
) -> VerifiedState:
    """Serve the priority-only model if the choice is behind it, and train on from it where free clients do not pay.

    ``without_free`` is the loss of the priority clients' own aggregate, if it differs from the priority-only model.
    Nobody chose these two by their losses, so chance favours neither. If free clients give no head start, or if the
    choice is far behind, training begins again from the priority-only model.
    """
    own_loss = math.inf if fallback.loss is None else fallback.loss
    state = replace(state, models=replace(state.models, priority_only=own.server, fallback=fallback))
    if without_free is not None:
        state = replace(state, head_start=averaged(state.head_start, own_loss, without_free))
    useless = state.head_start < LEAST
    if fallback.behind:
        state = replace(state, models=replace(state.models, served=own.server.weights, separate=True))
    if useless or (fallback.behind and loss > own_loss):
        state = replace(state, breadth=state.breadth / 2)
    elif not fallback.behind:
        state = replace(state, breadth=min(1.0, state.breadth * _GROWTH))
    if useless:
        return _restarted(replace(state, head_start=FIRST))
    return _restarted(state) if fallback.behind and loss > _above(own_loss, _FAR_BEHIND) else state


def _restarted(state: VerifiedState) -> VerifiedState:
    """Train on from the priority-only model."""
    models = state.models
    assert models.priority_only is not None
    restarted = AutoState(models.served, models.priority_only, separate=True, fallback=models.fallback)
    return replace(state, models=restarted)


def _reasons(
    verification: Verification, now: Mapping[int, float], behind: Mapping[int, float] | None = None
) -> dict[int, str]:
    """Say what was measured; of clients that were not, what the inner rule or the bounds on updates say."""
    waiting = dict.fromkeys(verification.proposed.clients, _NOT_MEASURED)
    measured = {k: f"with it, the priority clients' loss changes by {100 * change:+.2g} %" for k, change in now.items()}
    excluded = {k: f"{text}; {_EXCLUDED}" for k, text in measured.items() if behind and k in behind}
    return {**verification.proposed.reasons, **waiting, **measured, **excluded}
