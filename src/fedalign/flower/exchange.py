"""Sends messages to nodes over Flower's Grid and waits for the replies, but not for stragglers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedalign.flower.activity import Activity
from fedalign.flower.declining import NotWilling
from fedalign.flower.inbox import Inbox
from fedalign.flower.patience import Patience, Quorum, Timer
from fedalign.flower.polling import pause_after
from fedalign.flower.replies import Unanswered, Unreadable
from fedalign.protocol.messages import Lost

_SHORTEST, _LONGEST = 0.1, 1.0  # seconds between checks for replies
_TOGETHER = 8  # messages; Flower announces all of a call before it sends the parts of the first


@dataclass(frozen=True)
class Posted:
    """A message on its way: the client and its Flower node, what kind it is, when it was sent and when it expires."""

    client: int
    node: int
    kind: str
    sent: float
    expires: float


@dataclass
class Attendees:
    """Who answered in a round, and who did not in time and why. Those are not asked again in the round.

    Clients whose replies could not be read are ``unreadable``, with the reason.
    """

    answered: set[int] = field(default_factory=set)
    missed: dict[int, str] = field(default_factory=dict)
    unreadable: dict[int, str] = field(default_factory=dict)


class Exchange:
    """Exchanges one message with each of several nodes. ``seconds`` is the total time spent waiting, by purpose.

    ``largest`` limits the bytes of the arrays in a reply. ``is_priority`` tells the role of a client. ``has_quorum``
    says whether the answers of these priority clients are enough, so that the others need not be waited for, and
    ``is_reliable`` whether a free client has answered in the last rounds, so that it counts among those waited for.
    """

    def __init__(
        self,
        grid: Grid,
        patience: Patience,
        largest: int,
        is_priority: Callable[[int], bool] = lambda k: True,
        timer: Timer | None = None,
    ) -> None:
        self._grid, self.patience, self._is_priority = grid, patience, is_priority
        self.timer = timer or Timer()
        self._inbox = Inbox(grid, largest)
        self.nodes: dict[int, int] = {}  #: the Flower node of every connected client
        self.seconds: dict[str, float] = {}
        self.posted_to: set[int] = set()  #: the clients to which the messages of the last call were really sent
        self.activity = Activity()
        self.has_quorum: Quorum = lambda answered: False
        self.is_reliable: Callable[[int], bool] = lambda k: True
        self.round = Attendees()
        self._late: dict[str, Posted] = {}  # messages that nobody waits for any more, and that may still be answered
        self._waited = 0.0

    def __call__(
        self, kind: str, contents: Mapping[int, RecordDict], purpose: str, *, again: bool = False
    ) -> dict[int, RecordDict | Lost]:
        """Send each client its content and return the replies, or why there is none; late replies are ignored.

        A reply is checked and copied before anybody sees it; one that fails is ``Unreadable``, which is a ``Lost``.
        ``again`` is for a second message to clients that asked for it: free clients have the grace time alone then.
        """
        found: dict[int, RecordDict | Lost] = {k: self._not_asked(k) for k in contents}
        self.posted_to = set()
        self._read_late()
        busy = {posted.client for posted in self._late.values()}
        clients = []
        for k in contents:
            if k in self.nodes and k in busy and k not in self.round.missed:
                self.round.missed[k] = "it is still busy with an earlier message"
                found[k] = self._not_asked(k)
            elif k in self.nodes and k not in self.round.missed:
                clients.append(k)
        if not clients:
            return found
        began = self.timer.now()
        waiting = self.post(kind, {k: contents[k] for k in clients})
        self.posted_to = {posted.client for posted in waiting.values()}
        found |= {k: Lost("the message could not be sent") for k in clients if k not in self.posted_to}
        self.activity.asked(purpose, self.posted_to)
        for k, reply in self._replies(kind, waiting, began, again):
            found[k] = reply
            self.activity.answered(k, seen=not isinstance(reply, Lost))
        self.activity.ended()
        self._waited = self.timer.now() - began
        self.seconds[purpose] = self.seconds.get(purpose, 0.0) + self._waited
        return found

    def post(self, kind: str, contents: Mapping[int, RecordDict], ttl: float | None = None) -> dict[str, Posted]:
        """Send each client its content and return the messages by their number, without waiting for replies."""
        clients, now = list(contents), self.timer.now()
        limits = {k: self.patience.limit(self._is_priority(k)) if ttl is None else ttl for k in clients}
        messages = [Message(contents[k], self.nodes[k], kind, ttl=limits[k]) for k in clients]
        posted: dict[str, Posted] = {}
        for first in range(0, len(messages), _TOGETHER):
            numbers = self._grid.push_messages(messages[first : first + _TOGETHER])  # none if they are too large
            for number, k in zip(numbers, clients[first:], strict=False):
                if number:
                    posted[number] = Posted(k, self.nodes[k], kind, now, now + limits[k])
        return posted

    def collect(self, posted: Mapping[str, Posted]) -> Iterator[tuple[str, RecordDict | Lost]]:
        """Give the replies to messages of one kind that have come by now, checked, each with the message's number."""
        if posted:
            one = next(iter(posted.values()))
            yield from self._inbox.pull(posted, one.kind, one.expires - one.sent)

    def forget(self, number: str) -> None:
        """Drop what has come of the reply to a message that nobody waits for any more."""
        self._inbox.forget(number)

    def next_round(self) -> Attendees:
        """Begin a round, in which all clients may be asked again; return who answered in the one before."""
        before, self.round = self.round, Attendees()
        return before

    def _replies(
        self, kind: str, waiting: dict[str, Posted], began: float, again: bool
    ) -> Iterator[tuple[int, RecordDict | Lost]]:
        """Give the replies as they come, and at the end the reasons why there are no others."""
        asked = [posted.client for posted in waiting.values()]
        heard: set[int] = set()  # clients with a usable answer
        enough: float | None = None  # when enough clients had answered
        while waiting:
            now = self.timer.now()  # replies that came meanwhile are still read
            # The SuperLink sends error replies, not the node: the message it replies to identifies the client.
            for number, reply in self._inbox.pull(waiting, kind, self.patience.timeout):
                k = waiting.pop(number).client
                self._note_answer(k, reply)
                heard |= set() if isinstance(reply, Lost) else {k}
                yield k, reply
            if enough is None and self._is_enough(asked, {p.client for p in waiting.values()}, heard, again):
                enough = now - began
            until = None
            if enough is not None:
                owed = any(self._is_priority(posted.client) for posted in waiting.values())
                until = began + enough + self.patience.extra(self._waited if again else enough, owed)
            for number, posted in list(waiting.items()):
                reason = None
                if now >= posted.expires:
                    reason = f"no answer in {posted.expires - posted.sent:g} s"
                elif until is not None and now >= until:
                    reason = f"no answer in {now - began:.1f} s, when the round went on without it"
                if reason is not None:
                    del waiting[number]
                    self._give_up(number, posted, reason)
                    yield posted.client, Lost(reason)
            if waiting:
                due = min([posted.expires for posted in waiting.values()] + ([until] if until is not None else []))
                pause = pause_after(now - began, _SHORTEST, _LONGEST)
                self.timer.sleep(max(0.01, min(pause, due - now)))

    def _is_enough(self, asked: list[int], open_: Set[int], heard: Set[int], again: bool) -> bool:
        priority = {k for k in asked if self._is_priority(k)}
        if priority & open_ and not self.has_quorum(priority & heard):
            return False
        counted = [k for k in asked if k not in priority and self.is_reliable(k)]
        return again or self.patience.enough_free(counted, set(counted) - open_)

    def _note_answer(self, k: int, reply: RecordDict | Lost) -> None:
        if isinstance(reply, Unanswered) and not self._is_priority(k):
            self.round.missed[k] = reply.reason
        elif isinstance(reply, Unreadable):
            self.round.unreadable[k] = reply.reason
        elif not isinstance(reply, Lost) or isinstance(reply, NotWilling):
            self.round.answered.add(k)

    def _give_up(self, number: str, posted: Posted, reason: str) -> None:
        self.round.missed[posted.client] = reason
        if self.timer.now() < posted.expires:
            self._late[number] = posted
        else:
            self.forget(number)

    def _read_late(self) -> None:
        """Drop late replies, so that their clients are asked again, and messages that have expired."""
        for kind in dict.fromkeys(posted.kind for posted in self._late.values()):
            for number, _ in self.collect({i: posted for i, posted in self._late.items() if posted.kind == kind}):
                self.activity.seen([self._late.pop(number).client])
        now = self.timer.now()
        for number, posted in list(self._late.items()):
            if now >= posted.expires or self.nodes.get(posted.client) != posted.node:
                self.forget(number)
                del self._late[number]

    def _not_asked(self, k: int) -> Lost:
        if k not in self.nodes:
            return Lost("not connected")
        return Lost(self.round.missed.get(k, "not connected"))
