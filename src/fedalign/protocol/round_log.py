"""Notes that an algorithm takes during a round, and the record that they become."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fedalign.errors import DivergedError
from fedalign.protocol.ledger_values import RoundValues
from fedalign.protocol.messages import Declined, Lost, Model, Offered, Present, Refused, Reply
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import ClientRound, Decision, Fallback, Promise, RoundRecord, Tried
from fedalign.protocol.roster import Roster
from fedalign.protocol.scores import Scores
from fedalign.rules.rule import Broadcast, Measure, Selection, Similarity

UNANSWERED = "did not answer the evaluation"  #: the reason of a priority client without a measure; drivers may add why


class RoundLog:
    """What happened in one round: who was present, what clients answered, whose updates count and what it cost.

    A model counts once for every client that it is sent to in the round, whether the client measures it, trains it or
    both. Reported test figures do not count.
    """

    present: Present  #: set when the clients that can be reached are known

    def __init__(self, plan: Plan, round: int, previous: Model | None = None) -> None:
        self._plan, self.round = plan, round
        self.previous = previous  #: the model that the round before started from, where a ledger is kept
        self.ledger: RoundValues | None = None
        self.measures: dict[int, Measure] = {}
        self.replies: dict[int, Reply] = {}
        self.broadcast: Broadcast | None = None
        self.epsilon = plan.epsilon_at(round)
        self.skipped: str | None = None
        self.tried: tuple[Tried, ...] = ()
        self.similarities: Mapping[int, Similarity] = {}
        self.promise: Promise | None = None
        self._refused: dict[int, str] = {}
        self._shares: Mapping[int, float] = {}
        self._reasons: Mapping[int, str] = {}
        self._training_shares: Mapping[int, float] = {}
        self._training_reasons: Mapping[int, str] = {}
        self._down = self._up = self._samples = 0

    @property
    def roster(self) -> Roster:
        """The roster as it stands in this round."""
        return self.present.roster

    @property
    def trained(self) -> list[int]:
        """The priority clients that sent an update."""
        return [k for k, reply in self.replies.items() if isinstance(reply, Offered) and self.roster.priority[k]]

    @property
    def inclusion(self) -> float:
        """The priority clients' part of the model that the next round starts from; 1 if nothing was aggregated."""
        shares = self._training_shares
        return min(1.0, math.fsum(s for k, s in shares.items() if self.roster.priority[k])) if shares else 1.0

    def restart(self) -> None:
        """Forget what clients answered, because the round begins again; what was sent still counts."""
        self.measures, self.replies, self.broadcast, self.ledger = {}, {}, None, None

    def measured(self, measures: Mapping[int, Measure]) -> None:
        """Note the priority clients' measures of the model."""
        self.measures = dict(measures)
        self._down += len(self.present.priority)

    def invited(self, broadcast: Broadcast, invited: Sequence[int], replies: Mapping[int, Reply]) -> None:
        """Note the broadcast and what the invited clients replied."""
        self.broadcast = broadcast
        self.replies = {k: replies[k] for k in invited}
        self._down += sum(not self.roster.priority[k] for k in invited)
        for k, reply in self.replies.items():
            if not isinstance(reply, Lost) and reply.own is not None:
                self.measures[k] = reply.own
        self.sent_up([k for k, reply in self.replies.items() if isinstance(reply, Offered | Refused)])

    def sent_down(self, models: int) -> None:
        """Count models that the server sent to clients."""
        self._down += models

    def sent_up(self, clients: Collection[int]) -> None:
        """Count the updates of clients, and the samples that they trained on."""
        self._up += len(clients)
        self._samples += sum(self._plan.work[k] for k in clients) if self._plan.work else 0

    def skip(self, reason: str) -> None:
        """Note why nothing is aggregated in this round."""
        self.skipped = reason

    def refuse(self, refused: Mapping[int, str]) -> None:
        """Note updates that failed the server's checks. If a priority client's did, training has diverged."""
        diverged = [self.roster.names[k] for k in sorted(refused) if self.roster.priority[k]]
        if diverged:
            raise DivergedError.at(self.round, diverged, "the trained weights are not finite")
        self._refused |= refused

    def admitted(
        self,
        selection: Selection,
        shares: Mapping[int, float],
        training: tuple[Mapping[int, float], Mapping[int, str]] | None = None,
    ) -> None:
        """Note whose updates are in the served model, and why.

        ``training`` holds the shares and the reasons of the model that the next round trains, if it is a different one.
        """
        self._shares, self._reasons = shares, selection.reasons
        self._training_shares, self._training_reasons = training or (shares, {})
        self.epsilon = self.epsilon if selection.epsilon is None else selection.epsilon
        if self.broadcast is not None:
            self.broadcast = replace(self.broadcast, epsilon=self.epsilon)

    def record(
        self, scores: Scores, theta: float, fallback: Fallback | None = None, separate_training: bool = False
    ) -> RoundRecord:
        """Make the round's record."""
        return RoundRecord(
            self.round,
            self.epsilon,
            self._global()[0],
            self._global()[1],
            *scores[:3],
            self.round < self._plan.warmup,
            self.skipped,
            models_down=self._down,
            models_up=self._up,
            clients=tuple(self._client(k, name) for k, name in enumerate(self.roster.names)),
            samples=self._samples,
            tried=self.tried,
            fallback=fallback,
            base=separate_training,
            inclusion=self.inclusion,
            theta=theta,
            heldout_accuracy=scores.heldout_accuracy,
            heldout_loss=scores.heldout_loss,
            promise=self.promise if self.promise is not None and self.promise.worse_by is not None else None,
            ledger=self._values(),
        )

    def _values(self) -> RoundValues | None:
        """Return what the clients gave whose updates entered a model in the end."""
        if self._plan.ledger is None:
            return None
        found = self.ledger or RoundValues(self._plan.ledger.method_name, note=self.skipped or "")
        used = tuple(one for one in found.clients if self._decision(one.id)[0] in ("trained", "admitted", "base"))
        return replace(found, clients=used)

    def _global(self) -> tuple[float | None, float | None]:
        return (self.broadcast.loss, self.broadcast.accuracy) if self.broadcast is not None else (None, None)

    def _client(self, k: int, name: str) -> ClientRound:
        decision, reason = self._decision(k)
        own = self.measures.get(k)
        if not reason and isinstance(self.replies.get(k), Offered):
            reason = ((decision == "base" and self._training_reasons) or self._reasons).get(k, "")
        if not reason and own is not None and self.broadcast is not None:
            reason = self._plan.rule.why(own, self.broadcast, decision == "admitted")
        return ClientRound(
            k,
            name,
            self.roster.priority[k],
            self.present.reachable[k],
            own.loss if own else None,
            own.accuracy if own else None,
            decision,
            self._shares.get(k, 0.0),
            reason,
        )

    def _decision(self, k: int) -> tuple[Decision, str]:
        """Name what happened to a client, and why; the rule gives a reason that is empty here."""
        reply = self.replies.get(k)
        if not self.present.reachable[k]:
            excluded = self.present.excluded.get(k, Lost("not reachable"))
            return "refused" if isinstance(excluded, Refused) else "absent", excluded.reason
        if reply is None:
            return self._not_invited(k)
        if isinstance(reply, Lost):
            return "lost", reply.reason
        if isinstance(reply, Refused):
            return "refused", reply.reason
        if isinstance(reply, Declined):
            return "declined", reply.reason
        if self.roster.priority[k]:
            return "trained", "priority"
        if k in self._refused:
            return "refused", self._refused[k]
        if k in self._shares:
            return "admitted", ""
        return ("base", "") if k in self._training_shares else ("refused", self.skipped or "")

    def _not_invited(self, k: int) -> tuple[Decision, str]:
        if self.roster.priority[k]:
            return "lost", UNANSWERED
        if self.round < self._plan.warmup:
            return "absent", "warm-up: priority clients only"
        if not self._plan.rule.invites_free:
            return "absent", "not invited by the rule"
        return "absent", self.skipped or ""
