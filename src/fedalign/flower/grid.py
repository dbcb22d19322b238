"""Answers an algorithm's requests by messages to the clients over Flower's Grid."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedalign.aggregation.aggregator import Aggregation
from fedalign.aggregation.buffer_checks import BufferReader
from fedalign.aggregation.resemblance import resemblances
from fedalign.aggregation.update_checks import UpdateFacts, length_of, refusals
from fedalign.errors import FedalignError
from fedalign.flower.exchange import Exchange
from fedalign.flower.measuring import Measuring
from fedalign.flower.members import Members
from fedalign.flower.roster_file import Entry, RosterFile
from fedalign.flower.settings import Settings
from fedalign.flower.wire import HELLO, TRAIN, get_measure, get_model, put_model, put_task
from fedalign.protocol.messages import (
    Aggregate,
    Aggregated,
    Compare,
    Compared,
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
from fedalign.rules.auto import AutoAlign
from fedalign.rules.verified import Verified
from fedalign.simulation.driver import similarities_to
from fedalign.simulation.engine.layout import Layout

log = logging.getLogger("flwr")


class RoundFailedError(Exception):
    """Raised when a round gives no model to go on from; it is repeated, and then the run pauses."""


class BelowQuorumError(RoundFailedError):
    """Raised when the priority clients that answered have less weight than the quorum."""


class GridDriver:
    """Answers requests over the Grid, and holds the updates of the last :class:`Invite` until they are aggregated."""

    def __init__(self, grid: Grid, settings: Settings, roster: RosterFile, layout: Layout) -> None:
        self._grid, self._settings, self._file, self._layout = grid, settings, roster, layout
        self.exchange = Exchange(grid, settings.timeout)
        strangers = [entry for entry in self._connected().values() if entry not in roster.entries]
        entries = [*roster.entries, *sorted(strangers, key=lambda entry: entry.key)]
        self.members = Members(entries, settings.free_cap, settings.free_total or math.inf)
        self._rule = settings.make_rule()
        self._match_on = self._rule.match_on or settings.match_on
        self._aggregator = settings.make_aggregator()
        self._server_steps = settings.make_server_steps()
        self._received: torch.Tensor | None = None
        self._round = 0
        self._updates: dict[int, torch.Tensor] = {}
        self._buffers = BufferReader(layout)
        self._measuring = Measuring(self.exchange, self.members, settings.rounds)
        self.early = self._measuring.early

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
            Aggregate: self._aggregate,
            RoundDone: lambda done: None,
        }
        if type(request) not in answers:
            raise FedalignError(f"{type(request).__name__} cannot be answered over Flower: its algorithm has no server")
        return answers[type(request)](request)

    def online(self) -> set[int]:
        """Ask newly connected clients for their sample counts, and return the connected clients that have reported."""
        numbered = {node: self.members.number(entry) for node, entry in self._connected().items()}
        self.exchange.nodes = {k: node for node, k in numbered.items() if k is not None}
        new = [k for k in self.exchange.nodes if not self.members.has_reported(k)]
        contents = {k: RecordDict({"task": ConfigRecord({"client": k})}) for k in new}
        for k, content in self.exchange(HELLO, contents, "hello").items():
            samples = content.get("samples") if isinstance(content, RecordDict) else None
            name = self.members.name(k)
            if not isinstance(samples, MetricRecord):
                why = content.reason if isinstance(content, Lost) else "it did not report how many samples it has"
                log.warning("%s is left out for now: %s", name, why)
            elif not isinstance(samples.get("train"), int) or samples["train"] < 1:  # type: ignore[operator]
                log.warning("%s is left out: it has no training samples", name)
            elif lacks := [split for split in self._needed(k) if not samples.get(split)]:
                log.warning("%s is left out: it has no %s samples", name, lacks[0])
            else:
                self.members.report(k, int(samples["train"]))  # type: ignore[arg-type]
                log.info("%s is connected, with %d training samples", name, samples["train"])
        return {k for k in self.exchange.nodes if self.members.has_reported(k)}

    def _connected(self) -> dict[int, Entry]:
        keys = {int(node.node_id): bytes(node.public_key) for node in self._grid.get_nodes() if node.public_key}
        return self._file.who(keys)

    def _needed(self, k: int) -> tuple[str, ...]:
        """Return the splits that a client must have: the one that losses are compared on, and the evaluators' one."""
        evaluates = isinstance(self._rule, AutoAlign | Verified) and self.members.is_priority(k)
        return (self._match_on, *(["heldout"] if evaluates else []))

    def _who_is_there(self, request: WhoIsThere) -> Present | None:
        if request.purpose == "evaluate":
            return None  # the priority clients that take part are the evaluators
        online, roster = self.online(), self.members.roster()
        return Present(roster, tuple(k in online for k in range(len(roster))))

    def _invite(self, request: Invite) -> dict[int, Reply]:
        self._updates, self._received, self._round = {}, request.model, request.broadcast.round
        contents = {}
        for k in request.clients:
            contents[k] = content = RecordDict()
            put_model(content, request.model)
            rounds, priority = self._settings.rounds, self.members.is_priority(k)
            put_task(content, k, request.broadcast.round, rounds, request.split, priority, request.broadcast)
        answers = self.exchange(TRAIN, contents, "training")
        replies = {k: self._read(k, answer) for k, answer in answers.items()}
        self._check(replies, request.clients)
        return replies

    def _read(self, k: int, answer: RecordDict | Lost) -> Reply:
        if isinstance(answer, Lost):
            return answer
        priority = self.members.is_priority(k)
        own = get_measure(answer, "own")
        if own is not None and own.accuracy is None and self._rule.needs_accuracy:
            own = None  # without it the rule cannot decide
        declined = answer.get("declined")
        if isinstance(declined, ConfigRecord):
            if own is None:
                return Lost("it declined without a measure")
            return Declined(own, str(declined.get("reason", ""))[:200])
        if priority or (own is not None and math.isnan(own.loss)):  # NaN cannot be compared with other losses
            own = None
        if not priority and own is None:
            return Lost("its measure of the model is missing or makes no sense")
        try:
            self._updates[k] = get_model(answer, self._layout.size, self._layout.dtype)
        except FedalignError as error:
            return Refused(own, str(error))
        return Offered(own)

    def _check(self, replies: dict[int, Reply], invited: Iterable[int]) -> None:
        """Refuse updates that fail the checks, unless that leaves too little of the priority clients' weight."""
        facts = {k: self._facts(model) for k, model in self._updates.items()}
        refused = refusals(facts, [k for k in facts if self.members.is_priority(k)], self._server_steps)
        if not self._enough(k for k in facts if k not in refused):
            if not self._enough(facts):
                silent = [self.members.name(k) for k in invited if self.members.is_priority(k) and k not in facts]
                raise BelowQuorumError(f"no update from {', '.join([*silent, *self.members.missing(invited)])}")
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

    def _enough(self, clients: Iterable[int]) -> bool:
        return self.members.weight(clients) >= self._settings.quorum - 1e-9

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

    def _aggregate(self, request: Aggregate) -> Aggregated:
        assert self._received is not None
        if broken := self._not_finite():
            return Aggregated(refused=broken)
        size, seed = self._layout.trainable_size, self._settings.seed
        total = Aggregation(self._aggregator, request.mixes, size, seed=seed, round=self._round)
        for k, model in self._updates.items():
            total.add(k, model, self._received)
        return Aggregated(total.results())

    def _not_finite(self) -> dict[int, str]:
        """Return the priority clients whose updates are not finite; those of free clients were refused on arrival."""
        facts = {k: UpdateFacts(bool(torch.isfinite(model).all())) for k, model in self._updates.items()}
        return refusals(facts, list(facts), ())
