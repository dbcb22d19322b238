"""Calls the roll of a round over Flower: which clients are connected, have reported, and are not benched."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from fedalign.flower.attendance import Attendance
from fedalign.flower.bench import Bench
from fedalign.flower.exchange import Exchange
from fedalign.flower.greetings import Greetings
from fedalign.flower.live_roster import LiveRoster
from fedalign.flower.patience import Timer
from fedalign.flower.roster_file import RosterFile
from fedalign.flower.run_identity import RunIdentity, former_members
from fedalign.flower.sample_counts import SampleCounts
from fedalign.flower.settings import Settings
from fedalign.flower.wire import BENCHED
from fedalign.protocol.messages import Lost, Present, Refused, WhoIsThere

log = logging.getLogger("flwr")
Report = Callable[..., None]  #: gets an event of the audit log, a client's name and details
_TOLD = 3600.0  # seconds in which a benched client can learn that it is


class RollCall:
    """Knows the clients, and which of them take part. ``report`` is told of events for the audit log.

    ``largest`` limits the bytes of the arrays in a reply. ``identity`` is that of a run that is resumed.
    """

    def __init__(
        self,
        grid: Grid,
        settings: Settings,
        roster: RosterFile,
        largest: int,
        timer: Timer | None = None,
        identity: RunIdentity | None = None,
    ) -> None:
        self._grid, self._settings = grid, settings
        self.members = former_members(roster, identity, settings.free_cap, settings.free_total or math.inf)
        participation = settings.recipe.participation
        path = Path(settings.roster).expanduser()
        self._live = LiveRoster(path, roster, self.members, lambda now: participation.check(now, settings.rounds))
        self._live.connected(self._keys())  # strangers that are there from the start
        participation.check(self.members.roster(), settings.rounds)
        self.exchange = Exchange(grid, settings.patience, largest, self.members.is_priority, timer)
        self.exchange.has_quorum = self.is_quorum
        counts = SampleCounts({} if identity is None else identity.data)
        self.greetings = Greetings(self.exchange, self.members, counts, self._needed)
        self.attendance = Attendance(participation, self.members, settings.seed)
        self._bench = Bench()
        self.exchange.is_reliable = self._bench.is_reliable
        self.report: Report = lambda event, client=None, **details: None
        self._live.report = counts.report = lambda *event, **details: self.report(*event, **details)

    def online(self) -> set[int]:
        """Ask newly connected clients for their sample counts, and return the connected clients that have reported.

        It does not wait for answers: those that come later count the next time. A free client that declines is
        connected too: it is recorded as declined, and not sent any model.
        """
        roles = {k: self.members.is_priority(k) for k in range(len(self.members))}
        self.exchange.nodes = {k: node for node, k in self._live.connected(self._keys()).items()}
        self.greetings.refresh([k for k, role in roles.items() if self.members.is_priority(k) != role])
        self.exchange.activity.seen(self.exchange.nodes)
        self.greetings.exchange()
        return {k for k in self.exchange.nodes if self.members.has_reported(k) or k in self.greetings.not_willing}

    def unheard(self, *, priority: bool) -> bool:
        """Say whether the first answer of some connected client of this role may still come."""
        return any(self.members.is_priority(k) == priority for k in self.greetings.unheard())

    def is_quorum(self, clients: Iterable[int]) -> bool:
        """Say whether these clients have enough of the weight of this round's priority clients."""
        return self.attendance.weight(clients) >= self._settings.quorum - 1e-9

    def begin(self, round: int) -> None:
        """Begin a round: bench free clients that missed some of the last rounds, and tell them so.

        A client missed a round if it did not answer in time, or if its answer could not be read.
        """
        before, every = self.exchange.next_round(), self._settings.refresh
        if every and round and round % every == 0:
            self.greetings.refresh([k for k in self.exchange.nodes if self.members.has_reported(k)])
        for k in self._bench.returning(round):
            self.report("client_returns", self.members.name(k))
        found = {**before.unreadable, **before.missed}
        missed = {k: why for k, why in found.items() if not self.members.is_priority(k)}
        for k, benched in self._bench.note(round - 1, missed, before.answered - missed.keys()).items():
            name = self.members.name(k)
            log.warning("%s is benched for %d rounds: %s", name, benched.rounds, benched.reason)
            self.report("client_benched", name, rounds=benched.rounds, until=benched.until, reason=benched.reason)
            if k in self.exchange.nodes:
                told = ConfigRecord({"client": k, "rounds": benched.rounds, "until": benched.until})
                self.exchange.post(BENCHED, {k: RecordDict({"task": told})}, ttl=_TOLD)

    def who_is_there(self, request: WhoIsThere) -> Present | None:
        """Return the clients that train in a round, or those that evaluate; None: those that train evaluate, too."""
        everyone = range(len(self.members))
        left_out = {k: one for k, one in self._bench.at(request.round).items() if not self.members.is_priority(k)}
        if request.purpose == "train":
            online = self.online() - left_out.keys()
        else:
            online = {k for k in self.exchange.nodes if self.members.has_reported(k)}
        present = self.attendance.present(request, online)
        if present is None:
            return None
        absent: dict[int, Lost | Refused] = dict(self.greetings.excluded)
        absent |= {k: Lost(one.reason_in(request.round)) for k, one in left_out.items()}
        absent |= {k: Lost("removed from the roster") for k in everyone if self.members.is_removed(k)}
        return replace(present, excluded=absent)

    def _keys(self) -> dict[int, bytes]:
        return {int(node.node_id): bytes(node.public_key) for node in self._grid.get_nodes() if node.public_key}

    def _needed(self, k: int) -> tuple[str, ...]:
        """Return the splits that a client must have: the one that losses are compared on, and the evaluators' one."""
        rule = self._settings.make_rule()
        evaluates = rule.evaluates and self.members.is_priority(k)
        return (rule.match_on or self._settings.match_on, *(["heldout"] if evaluates else []))
