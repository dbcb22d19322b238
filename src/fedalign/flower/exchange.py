"""Sends messages to nodes over Flower's Grid and waits for the replies."""

from __future__ import annotations

import time
from collections.abc import Mapping

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedalign.protocol.messages import Lost

_POLL = 0.5  # seconds between checks for replies; the interval grows while none come


class Exchange:
    """Exchanges one message with each of several nodes. ``seconds`` is the total time spent waiting, by purpose."""

    def __init__(self, grid: Grid, timeout: float) -> None:
        self._grid, self._timeout = grid, timeout
        self.nodes: dict[int, int] = {}  #: the Flower node of every connected client
        self.seconds: dict[str, float] = {}

    def __call__(self, kind: str, contents: Mapping[int, RecordDict], purpose: str) -> dict[int, RecordDict | Lost]:
        """Send each client its content and return the replies, or why there is none; late replies are ignored."""
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
        pause = _POLL
        while waiting:
            late = time.monotonic() - began >= limit  # replies that came meanwhile are still read
            for reply in self._grid.pull_messages(list(waiting)):
                # The SuperLink sends error replies, not the node: the message it replies to identifies the client.
                k = waiting.pop(reply.metadata.reply_to_message_id, -1)
                if k >= 0:
                    found[k] = _content(reply, limit)
            if late:
                break
            if waiting:
                time.sleep(pause)
                pause = min(1.0, pause * 1.1)
        self.seconds[purpose] = self.seconds.get(purpose, 0.0) + time.monotonic() - began
        return found


def _content(reply: Message, limit: float) -> RecordDict | Lost:
    if not reply.has_error():
        return reply.content
    if reply.error.code in (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE):
        return Lost(f"no answer in {limit:g} s")
    if reply.error.code == ErrorCode.NODE_UNAVAILABLE:
        return Lost("its node has stopped answering")
    lines = (reply.error.reason or "").strip().splitlines() or ["no reason given"]
    return Lost(f"error {reply.error.code}: {lines[-1][:200]}")
