"""FedALIGN: section 3 of the paper, as a generator that yields requests and does no I/O.

Ravi and Shomorony, "Utilizing Free Clients in Federated Learning for Focused Model Enhancement" (2023). ``P`` are the
priority clients, ``F_k(w)`` is client k's loss, ``p_k`` its weight, and ``F(w) = Σ_{k∈P} p_k F_k(w)``. With a rule
that admits nobody, or everybody, the same rounds are FedAvg on ``P``, or on all clients.

The functions below, in the order in which a round calls them, are the paper's steps. What they yield is defined in
``messages.py``; a driver answers it, in a simulation or over a network. ``log`` takes notes for the round's record.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Mapping
from dataclasses import replace
from typing import Any

from fedalign.errors import DivergedError
from fedalign.protocol.aggregate import check_selection, mix_of, shares, weighted_mean
from fedalign.protocol.messages import (
    Aggregate,
    Compare,
    Evaluate,
    Invite,
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
from fedalign.protocol.records import History
from fedalign.protocol.round_log import RoundLog
from fedalign.protocol.scores import scores
from fedalign.protocol.valuing import value_selection, with_previous
from fedalign.rules.rule import Broadcast, Offer, Selection, Similarity
from fedalign.training.server import ServerModel

Offers = dict[int, Offer]


def fedalign(plan: Plan, snapshot: Snapshot) -> Run:
    """Run FedALIGN from a snapshot to its last round. The snapshot of a new run holds the initial ``model`` alone."""
    history = History()
    server = ServerModel.restore("model", snapshot.tensors)
    theta, previous = snapshot.values.get("theta", 0.0), snapshot.tensors.get("previous")
    for t in range(snapshot.round, plan.rounds):
        log, previous = RoundLog(plan, t, previous), server.weights
        server = yield from fedalign_round(plan, t, server, log)
        measured = yield from scores(plan, log.roster, server.weights)
        theta = (t * theta + log.inclusion) / (t + 1)
        record = log.record(measured, theta)
        saved = Snapshot(t + 1, server.named("model"), {"theta": theta})
        yield RoundDone(record, server.weights, with_previous(plan, saved, previous))
        history.rounds.append(record)
    return Result(server.weights, history)


def fedalign_round(plan: Plan, t: int, server: ServerModel, log: RoundLog) -> Generator[Request, Any, ServerModel]:
    """Run round t from the server's model ``w``, and return the server's next model."""
    w = server.weights
    log.present = yield WhoIsThere(t)
    sent = yield from broadcast(plan, t, w, log)  # the priority clients measure w: F(w), and the round's ε
    if sent is None:
        return server
    offers = yield from invite(plan, w, sent, log)  # on the client: F_k(w) ≤ F(w) + ε; local work
    if not log.trained:
        return server
    mean, selection = yield from admit(plan, sent, offers, log)  # on the server: |F_k(w) − F(w)| ≤ ε; Σ p_k w_k / Σ p_k
    if plan.ledger is not None:
        yield from value_selection(plan, log, server, selection)  # what each update does to F
    return server.step(mean, plan.server)


def broadcast(plan: Plan, t: int, w: Model, log: RoundLog) -> Generator[Request, Any, Broadcast | None]:
    """Let the priority clients measure w, and return what the server broadcasts: ``F(w)`` and ``ε_t``."""
    priority = log.present.priority
    (measures,) = yield Evaluate(((w, priority),), plan.match_on)
    log.measured(measures)
    if not measures:
        log.skip("no priority client answered" if priority else "no priority client was reachable")
        return None
    loss, accuracy = weighted_mean(log.roster, measures)
    if not math.isfinite(loss):
        bad = [log.roster.names[k] for k, measure in measures.items() if not math.isfinite(measure.loss)]
        raise DivergedError.at(t, bad, "the model's loss is not finite")
    return Broadcast(t, loss, accuracy, plan.epsilon_at(t))


def invite(
    plan: Plan, w: Model, sent: Broadcast, log: RoundLog, beside: Model | None = None
) -> Generator[Request, Any, Offers]:
    """Send w to the clients. A free client offers an update if the model serves it (``F_k ≤ F + ε``), else declines.

    During warm-up only priority clients are invited. Those that take part run their local work. ``beside`` is a model
    that the priority clients will train as well in this round.
    """
    free = log.present.free if plan.invites_free(sent.round) else ()
    invited = tuple(sorted([*log.measures, *free]))
    also = None if beside is None else (beside, tuple(log.measures))
    log.invited(sent, invited, (yield Invite(w, invited, sent, plan.rule, plan.match_on, also)))
    offers = {k: Offer(reply.own) for k, reply in log.replies.items() if isinstance(reply, Offered) and reply.own}
    if not log.trained:
        log.skip("no priority client sent an update")
    elif plan.rule.needs_updates:
        offers = yield from compare(offers, log)
    elif plan.ledger is not None:  # which needs the updates; the rule decides without them
        compared = yield from compare(offers, log)
        offers = {k: offers[k] for k in compared}
    return offers


def compare(offers: Offers, log: RoundLog) -> Generator[Request, Any, Offers]:
    """Compare every update with the priority clients' mean update, for rules that decide by updates."""
    reference = shares(log.present, log.trained)
    compared = yield Compare(reference, tuple(sorted([*log.trained, *offers])))
    log.refuse(compared.refused)
    log.similarities = compared.similarities
    kept = [k for k in offers if k not in compared.refused]
    noise = noise_of(reference, compared.similarities)
    return {k: replace(offers[k], similarity=compared.similarities[k], noise=noise) for k in kept}


def noise_of(reference: Mapping[int, float], similarities: Mapping[int, Similarity]) -> float | None:
    """Return the variance of a weighted mean update over its squared length; None for the mean of a single update.

    It is the usual estimate from how much the updates differ: ``Σq² / (1 − Σq²) · Σ q_k ‖Δ_k − Δ‖²`` with shares q.

    >>> noise_of({0: 0.5, 1: 0.5}, {0: Similarity(1.0, 1.5), 1: Similarity(1.0, 0.5)})
    0.25
    """
    squares = math.fsum(share**2 for share in reference.values())
    if len(reference) < 2 or squares >= 1:
        return None
    apart = math.fsum(share * similarities[k].distance for k, share in reference.items())
    return squares / (1 - squares) * apart


def admit(
    plan: Plan, sent: Broadcast, offers: Offers, log: RoundLog
) -> Generator[Request, Any, tuple[Model, Selection]]:
    """Admit free clients (``|F_k − F| ≤ ε``) and aggregate: ``Σ p_k w_k / Σ p_k`` over P and those admitted.

    An update that fails the server's checks is refused, and the rule selects again among the others.
    """
    while True:
        selection = check_selection(plan.rule, plan.rule.select(offers, sent), offers)
        mix = mix_of(log.present, log.trained, selection)
        aggregated = yield Aggregate((mix,), again=plan.ledger is not None)
        if not aggregated.refused:
            log.admitted(selection, mix.shares)
            return aggregated.models[0], selection
        log.refuse(aggregated.refused)
        offers = without(offers, aggregated.refused)


def without(offers: Offers, refused: Collection[int]) -> Offers:
    """Return the offers of the clients that were not refused."""
    return {k: offer for k, offer in offers.items() if k not in refused}
