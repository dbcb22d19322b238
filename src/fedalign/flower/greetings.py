"""Asks clients how many samples they have, without waiting: a client takes part once it has answered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from flwr.app import ConfigRecord, RecordDict

from fedalign.flower.declining import NotWilling
from fedalign.flower.exchange import Exchange, Posted
from fedalign.flower.hello import read_fingerprint, read_hello
from fedalign.flower.members import Members
from fedalign.flower.sample_counts import SampleCounts
from fedalign.flower.wire import HELLO, keeps_models, wants_personal
from fedalign.protocol.messages import Lost, Refused

log = logging.getLogger("flwr")


class Greetings:
    """Sends a hello to connected clients that have not reported yet, and reads the answers when they have come.

    ``needed`` names the splits that a client must have besides training samples. ``excluded`` says why a connected
    client takes no part, and ``not_willing`` has the free clients that declined.
    """

    def __init__(
        self, exchange: Exchange, members: Members, counts: SampleCounts, needed: Callable[[int], Iterable[str]]
    ) -> None:
        self._exchange, self._members, self.counts, self._needed = exchange, members, counts, needed
        self._posted: dict[str, Posted] = {}
        self._heard: set[int] = set()  # clients that have answered at least once, or let the first hello expire
        self.excluded: dict[int, Lost | Refused] = {}
        self.not_willing: dict[int, NotWilling] = {}

    def exchange(self) -> None:
        """Send and read what there is, without waiting."""
        self._forget_others()
        open_ = {posted.client for posted in self._posted.values()}
        self._ask(k for k in self._exchange.nodes if not self._members.has_reported(k) and k not in open_)
        for number, answer in self._exchange.collect(dict(self._posted)):
            k = self._posted.pop(number).client
            self._exchange.activity.answered(k, seen=not isinstance(answer, Lost))
            self._read(k, answer)
        now = self._exchange.timer.now()
        for number, posted in list(self._posted.items()):
            if now >= posted.expires:
                self._drop(number)
                self._read(posted.client, Lost(f"no answer in {posted.expires - posted.sent:g} s"))

    def refresh(self, clients: Iterable[int]) -> None:
        """Ask clients that have reported again, such as for the number of their samples by now."""
        open_ = {posted.client for posted in self._posted.values()}
        self._ask(k for k in clients if k in self._exchange.nodes and k not in open_)

    def unheard(self) -> set[int]:
        """Return the connected clients that have never been heard of, whose first answer may still come."""
        return {posted.client for posted in self._posted.values()} - self._heard

    def _ask(self, clients: Iterable[int]) -> None:
        contents = {k: RecordDict({"task": ConfigRecord({"client": k})}) for k in clients}
        self._posted |= self._exchange.post(HELLO, contents)
        for k in contents:
            if not self._members.has_reported(k):
                self.excluded.setdefault(k, Lost("it has not said yet how many samples it has"))

    def _read(self, k: int, answer: RecordDict | Lost) -> None:
        self._heard.add(k)
        if isinstance(answer, Lost) and self._members.has_reported(k):
            return  # what it said before still holds
        before = self.excluded.pop(k, None) or self.not_willing.pop(k, None)
        said, name = read_hello(answer, self._needed(k)), self._members.name(k)
        if isinstance(said, dict):
            assert not isinstance(answer, Lost)
            if not self._members.has_reported(k):
                log.info("%s is connected, with %d training samples", name, said["train"])
            counted = self.counts.counted(self._members.entries[k], said["train"], read_fingerprint(answer))
            self._members.report(k, said["train"], said["test"], counted)
            if keeps_models(answer):
                self._members.keep_models.add(k)
            if wants_personal(answer):
                self._members.personal.add(k)
            return
        self._members.forget(k)  # it had data before, and has none now
        if said != before:
            log.warning("%s is left out%s: %s", name, " for now" if isinstance(answer, Lost) else "", said.reason)
        if isinstance(said, NotWilling) and not self._members.is_priority(k):
            self.not_willing[k] = said
        else:
            self.excluded[k] = said

    def _forget_others(self) -> None:
        """Forget clients that are no longer connected, or with another node."""
        nodes = self._exchange.nodes
        for number, posted in list(self._posted.items()):
            if nodes.get(posted.client) != posted.node:
                self._drop(number)
        self._heard &= nodes.keys()
        self.excluded = {k: why for k, why in self.excluded.items() if k in nodes}
        self.not_willing = {k: why for k, why in self.not_willing.items() if k in nodes}

    def _drop(self, number: str) -> None:
        self._exchange.forget(number)
        del self._posted[number]
