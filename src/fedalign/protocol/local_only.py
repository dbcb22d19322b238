"""Local-only training: every client trains its own model, with no server. It is the baseline without a federation."""

from __future__ import annotations

from fedalign.errors import DivergedError
from fedalign.protocol.aggregate import weighted_mean
from fedalign.protocol.messages import (
    Evaluate,
    Present,
    Result,
    RoundDone,
    Run,
    Snapshot,
    TrainAlone,
    WhoIsThere,
)
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import ClientRound, History, RoundRecord
from fedalign.protocol.scores import scores_of
from fedalign.rules.rule import Measure


def local_only(plan: Plan, snapshot: Snapshot) -> Run:
    """Let every client train alone. A new run's snapshot holds one initial ``model``; a later one, a model each."""
    history = History()
    present: Present = yield WhoIsThere(snapshot.round)
    roster = present.roster
    priority = [k for k in range(len(roster)) if roster.priority[k]]
    clients = range(len(roster)) if plan.free_alone else priority
    start = snapshot.tensors
    models = {k: start[_name(k)] if _name(k) in start else start["model"] for k in range(len(roster))}
    for t in range(snapshot.round, plan.rounds):
        measured: list[dict[int, Measure]] = yield Evaluate(tuple((models[k], (k,)) for k in clients), plan.match_on)
        own = {k: of_model[k] for k, of_model in zip(clients, measured, strict=True)}
        models |= yield TrainAlone({k: models[k] for k in clients}, t)
        diverged = [roster.names[k] for k in clients if models[k] is None]
        if diverged:
            raise DivergedError.at(t, diverged, "the trained weights are not finite")
        loss, accuracy = weighted_mean(roster, {k: own[k] for k in priority})
        scores = yield from scores_of(plan, roster, tuple((models[k], (k,)) for k in priority))
        record = RoundRecord(
            t, None, loss, accuracy, *scores[:3], False, None, 0, 0,
            clients=tuple(
                ClientRound(k, name, roster.priority[k], True, own[k].loss, own[k].accuracy, "trained", 0.0,
                            "alone, no server")
                if k in own else ClientRound(k, name, False, False, None, None, "absent", 0.0, "not asked for")
                for k, name in enumerate(roster.names)
            ),
            samples=sum(plan.work[k] for k in clients) if plan.work else 0,
            heldout_accuracy=scores.heldout_accuracy,
            heldout_loss=scores.heldout_loss,
        )  # fmt: skip
        yield RoundDone(record, tuple(models.values()), Snapshot(t + 1, {_name(k): models[k] for k in models}))
        history.rounds.append(record)
    return Result(tuple(models.values()), history)


def _name(client: int) -> str:
    return f"client-{client}"
