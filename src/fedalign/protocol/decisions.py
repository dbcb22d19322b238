"""What a round's record says of every client: what happened to it, and why."""

from __future__ import annotations

from collections.abc import Mapping

from fedalign.protocol.choice import Choice
from fedalign.protocol.messages import Declined, Lost, Rejected, Reply, Update
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import ClientRound, Decision
from fedalign.rules.rule import Broadcast, Measure
from fedalign.training.participation import Presence


def client_rounds(
    plan: Plan,
    presence: Presence,
    broadcast: Broadcast | None,
    own: Mapping[int, Measure],
    replies: Mapping[int, Reply],
    choice: Choice | None,
    warmup: bool,
    skipped: str | None,
) -> tuple[ClientRound, ...]:
    """Tell, of every client, its measure of the model, the decision, its weight in what is served, and the reason."""
    shares = choice.served.shares if choice is not None else {}
    base_shares = choice.base.shares if choice is not None else {}

    def record_of(k: int, name: str) -> ClientRound:
        reply, mine = replies.get(k), own.get(k)
        decision, reason = _decision(plan, k, presence, warmup, reply, k in shares, k in base_shares, skipped)
        if choice is not None and k in choice.broken:
            reason = "its trained weights are not finite"
        elif choice is not None and isinstance(reply, Update):
            reason = reason or ((decision == "base" and choice.in_base) or choice.reasons).get(k, "")
        if not reason and mine is not None and broadcast is not None:
            reason = plan.rule.why(mine, broadcast, decision == "admitted")
        return ClientRound(
            k,
            name,
            plan.roster.priority[k],
            presence.reachable[k],
            mine.loss if mine else None,
            mine.accuracy if mine else None,
            decision,
            shares.get(k, 0.0),
            reason,
        )

    return tuple(record_of(k, name) for k, name in enumerate(plan.roster.names))


def _decision(
    plan: Plan,
    k: int,
    presence: Presence,
    warmup: bool,
    reply: Reply | None,
    included: bool,
    in_base: bool,
    skipped: str | None,
) -> tuple[Decision, str]:
    """Name what happened to a client, and why; an empty reason is the rule's to give."""
    is_priority = plan.roster.priority[k]
    if not presence.reachable[k]:
        return "absent", "not reachable"
    if reply is None:
        if is_priority:
            return "lost", "did not answer the evaluation"
        if warmup:
            return "absent", "warm-up: priority clients only"
        if not plan.rule.invites_free:
            return "absent", "not invited by the rule"
        return "absent", skipped or ""
    if isinstance(reply, Lost):
        return "lost", reply.reason
    if isinstance(reply, Rejected):
        return "refused", reply.reason
    if isinstance(reply, Declined):
        return "declined", reply.reason
    if is_priority:
        return "trained", "priority"
    if included or in_base:
        return ("admitted" if included else "base"), ""
    return "refused", skipped or ""
