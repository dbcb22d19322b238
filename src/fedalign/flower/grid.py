"""Answers an algorithm's requests by messages to the clients over Flower's Grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from flwr.app import RecordDict
from flwr.serverapp import Grid

from fedalign.aggregation.aggregator import Aggregation
from fedalign.aggregation.buffer_checks import BufferReader
from fedalign.aggregation.cosines import update_cosines
from fedalign.aggregation.resemblance import resemblances
from fedalign.aggregation.update_checks import UpdateFacts, length_of, refusals
from fedalign.errors import FedalignError
from fedalign.flower.control_variates import ControlVariates
from fedalign.flower.declining import NotWilling
from fedalign.flower.inviting import Inviting
from fedalign.flower.measuring import Measuring
from fedalign.flower.packing import Packing
from fedalign.flower.patience import Timer
from fedalign.flower.replies import Unreadable
from fedalign.flower.roll_call import RollCall
from fedalign.flower.roster_file import RosterFile
from fedalign.flower.run_identity import RunIdentity
from fedalign.flower.settings import Settings
from fedalign.flower.shipping import Shipping
from fedalign.flower.texts import plain_text
from fedalign.flower.wire import get_measure
from fedalign.protocol.messages import (
    Aggregate,
    Aggregated,
    Compare,
    Compared,
    Cosines,
    Declined,
    Evaluate,
    Invite,
    Lost,
    Offered,
    Paired,
    Present,
    Refused,
    Reply,
    Resemble,
    RoundDone,
    WhoIsThere,
)
from fedalign.protocol.records import RoundRecord
from fedalign.protocol.round_log import UNANSWERED
from fedalign.rules.rule import Measure
from fedalign.simulation.driver import similarities_to
from fedalign.simulation.engine.layout import Layout


class RoundFailedError(Exception):
    """Raised when a round gives no model to go on from; it is repeated, and then the run pauses."""


class BelowQuorumError(RoundFailedError):
    """Raised when the priority clients that answered have less weight than the quorum."""


class GridDriver:
    """Answers requests over the Grid, and holds the updates of the last :class:`Invite` until they are aggregated."""

    def __init__(
        self,
        grid: Grid,
        settings: Settings,
        roster: RosterFile,
        layout: Layout,
        packing: Packing,
        timer: Timer | None = None,
        identity: RunIdentity | None = None,
    ) -> None:
        self._settings, self._layout = settings, layout
        # A reply has at most two models' worth of arrays, and the arrays' headers.
        largest = 2 * layout.size * layout.dtype.itemsize + (1 << 16)
        self.roll = RollCall(grid, settings, roster, largest, timer, identity)
        self.members, self.exchange, self.attendance = self.roll.members, self.roll.exchange, self.roll.attendance
        self.online = self.roll.online
        self._rule = settings.make_rule()
        recipe = settings.recipe
        self._aggregator, self._server_steps = recipe.aggregator, recipe.server_steps
        self.controls = ControlVariates(settings.make_local(), layout, self.members, settings.rounds)
        self._received: torch.Tensor | None = None
        self._round = 0
        self._updates: dict[int, torch.Tensor] = {}
        self._buffers = BufferReader(layout)
        self.shipping = Shipping(self.exchange, packing, settings.cache)
        self._measuring = Measuring(self.shipping, self.members, settings.rounds)
        self.early = self._measuring.early
        self._inviting = Inviting(self.shipping, self.members, settings.rounds, self.controls)

    def answer(self, request: object) -> Any:
        """Answer one of an algorithm's requests.

        Raises :class:`BelowQuorumError` if too few priority clients sent an update, and :class:`FedalignError` for a
        request that needs no server.
        """
        answers: dict[type, Callable[[Any], Any]] = {
            WhoIsThere: self._who_is_there,
            Evaluate: self._measuring.evaluate,
            Paired: self._measuring.compare,
            Invite: self._invite,
            Compare: self._compare,
            Resemble: self._resemble,
            Cosines: self._cosines,
            Aggregate: self._aggregate,
            RoundDone: lambda done: None,
        }
        if type(request) not in answers:
            raise FedalignError(f"{type(request).__name__} cannot be answered over Flower: its algorithm has no server")
        return answers[type(request)](request)

    def measure_finally(self, model: torch.Tensor, clients: int) -> tuple[Measure | None, ...]:
        """Let the first ``clients`` of the roster measure the final model on their test data; None: no such measure.

        What free clients report is not verified.
        """
        online = self.online()
        asked = tuple(k for k in self.members.with_test() if k < clients and k in online)
        (found,) = self._measuring.evaluate(Evaluate(((model, asked),), "test"))
        return tuple(found.get(k) for k in range(clients))

    def explained(self, record: RoundRecord) -> RoundRecord:
        """Add to a round's record why priority clients did not answer an evaluation, such as an error on a node."""
        why = self._measuring.failures
        clients = tuple(
            replace(c, reason=f"{c.reason}: {why[c.id]}") if c.reason == UNANSWERED and c.id in why else c
            for c in record.clients
        )
        return replace(record, clients=clients)

    def _who_is_there(self, request: WhoIsThere) -> Present | None:
        if request.purpose == "train":
            self._measuring.failures.clear()
            self.roll.begin(request.round)
        return self.roll.who_is_there(request)

    def _invite(self, request: Invite) -> dict[int, Reply]:
        answers = self._inviting.ask(request, self.roll.greetings.not_willing)
        self._updates, self._round = {}, request.broadcast.round
        self._received = self.shipping.sent(request.model)  # an update is what clients made of what they got
        replies = {k: self._read(k, answers[k]) for k in request.clients}
        self._check(replies, request.clients)
        return replies

    def _read(self, k: int, answer: RecordDict | Lost) -> Reply:
        if isinstance(answer, NotWilling):
            return Declined(None, answer.reason)
        if isinstance(answer, Lost):
            return Refused(None, answer.reason) if isinstance(answer, Unreadable) else answer
        priority = self.members.is_priority(k)
        own = get_measure(answer, "own")
        if own is not None and own.accuracy is None and self._rule.needs_accuracy:
            own = None  # without it the rule cannot decide
        declined = answer.get("declined")
        if declined is not None:
            if own is None:
                return Refused(None, "it declined without a measure")
            return Declined(own, plain_text(declined.get("reason", "")))
        if priority:
            own = None
        elif own is None:
            return Refused(None, "its measure of the model is missing or makes no sense")
        elif math.isnan(own.loss):  # it cannot be compared with other losses
            return Lost("its measure of the model is missing or makes no sense")
        try:
            self._updates[k] = self._inviting.update(k, answer)
        except FedalignError as error:
            return Refused(own, plain_text(str(error)))
        return Offered(own)

    def _check(self, replies: dict[int, Reply], invited: Iterable[int]) -> None:
        """Refuse updates that fail the checks, unless that leaves too little of the priority clients' weight."""
        facts = {k: self._facts(model) for k, model in self._updates.items()}
        refused = refusals(facts, [k for k in facts if self.members.is_priority(k)], self._server_steps)
        if not self.roll.is_quorum(k for k in facts if k not in refused):
            if not self.roll.is_quorum(facts):
                silent = [self.members.name(k) for k in invited if self.members.is_priority(k) and k not in facts]
                raise BelowQuorumError(f"no update from {', '.join([*silent, *self.attendance.missing(invited)])}")
            # All answered, so the model itself diverged, which the algorithm handles.
            refused = {k: why for k, why in refused.items() if not self.members.is_priority(k)}
        for k, why in refused.items():
            reply = replies[k]
            assert isinstance(reply, Offered)
            replies[k] = Refused(reply.own, why)
            del self._updates[k]

    def _facts(self, model: torch.Tensor) -> UpdateFacts:
        assert self._received is not None
        length = float(length_of(model, self._received, self._layout.trainable_size))
        return UpdateFacts(bool(torch.isfinite(model).all()), length, self._buffers.read(model, self._received))

    def _compare(self, request: Compare) -> Compared:
        if broken := self._not_finite():
            return Compared({}, broken)
        size, received = self._layout.trainable_size, self._received
        assert received is not None
        return Compared(
            similarities_to(lambda k: (self._updates[k] - received)[:size], request.reference, request.clients)
        )

    def _resemble(self, request: Resemble) -> dict[tuple[int, int], float]:
        assert self._received is not None
        return resemblances(request.mix, self._updates, self._received, self._layout.trainable_size)

    def _cosines(self, request: Cosines) -> dict[tuple[int, int], float]:
        assert self._received is not None
        size = self._layout.trainable_size
        return update_cosines(request.clients, self._updates, self._received, request.previous, size)

    def _aggregate(self, request: Aggregate) -> Aggregated:
        assert self._received is not None
        if broken := self._not_finite():
            return Aggregated(refused=broken)
        size, seed = self._layout.trainable_size, self._settings.seed
        total = Aggregation(self._aggregator, request.mixes, size, seed=seed, round=self._round)
        for k, model in self._updates.items():
            total.add(k, model, self._received)
        self.controls.renew(self._received, self._updates, request.mixes[0], self._round)
        return Aggregated(total.results())

    def _not_finite(self) -> dict[int, str]:
        """Return the priority clients whose updates are not finite; those of free clients were refused on arrival."""
        facts = {k: UpdateFacts(bool(torch.isfinite(model).all())) for k, model in self._updates.items()}
        return refusals(facts, list(facts), ())
