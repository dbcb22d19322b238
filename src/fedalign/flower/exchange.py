"""Sends messages to nodes over Flower's Grid and waits for the replies."""

from __future__ import annotations

import time
from collections.abc import Mapping

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedalign.flower.activity import Activity
from fedalign.flower.inbox import Inbox
from fedalign.flower.polling import pause_after
from fedalign.protocol.messages import Lost

_SHORTEST, _LONGEST = 0.1, 1.0  # seconds between checks for replies


class Exchange:
    """Exchanges one message with each of several nodes. ``seconds`` is the total time spent waiting, by purpose.

    ``largest`` limits the bytes of the arrays in a reply.
    """

    def __init__(self, grid: Grid, timeout: float, largest: int) -> None:
        self._grid, self._timeout = grid, timeout
        self._inbox = Inbox(grid, largest)
        self.nodes: dict[int, int] = {}  #: the Flower node of every connected client
        self.seconds: dict[str, float] = {}
        self.activity = Activity()

    def __call__(self, kind: str, contents: Mapping[int, RecordDict], purpose: str) -> dict[int, RecordDict | Lost]:
        """Send each client its content and return the replies, or why there is none; late replies are ignored.

        A reply is checked and copied before anybody sees it; one that fails is ``Unreadable``, which is a ``Lost``.
        """
        found: dict[int, RecordDict | Lost] = {k: Lost("not connected") for k in contents}
        clients = [k for k in contents if k in self.nodes]
        if not clients:
            return found
        began, limit = time.monotonic(), self._timeout
        messages = [Message(contents[k], self.nodes[k], kind, ttl=limit) for k in clients]
        ids = list(self._grid.push_messages(messages))
        waiting = {i: k for i, k in zip(ids, clients, strict=False) if i}
        for k in clients:
            found[k] = Lost(f"no answer in {limit:g} s" if k in waiting.values() else "the message could not be sent")
        self.activity.asked(purpose, waiting.values())
        while waiting:
            late = time.monotonic() - began >= limit  # replies that came meanwhile are still read
            # The SuperLink sends error replies, not the node: the message it replies to identifies the client.
            for answered, reply in self._inbox.pull(waiting, kind, limit):
                k = waiting.pop(answered)
                found[k] = reply
                self.activity.answered(k, seen=not isinstance(reply, Lost))
            if late:
                break
            if waiting:
                time.sleep(pause_after(time.monotonic() - began, _SHORTEST, _LONGEST))
        self.activity.ended()
        self.seconds[purpose] = self.seconds.get(purpose, 0.0) + time.monotonic() - began
        return found
