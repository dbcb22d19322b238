"""Fetches replies from the SuperLink, so that no reply can stop, fill or delay the server.

Flower's own ``Grid.pull_messages`` fetches a reply whole before anybody can look at it, waits up to two hours for one
that was announced and not sent, and loses all replies of a call if one of them cannot be decoded. So replies are
fetched here with the same requests, object by object, within limits.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.superlink.grid.http_grid import HttpGrid

from fedalign.errors import FedalignError
from fedalign.flower.replies import RECORDS, WORDS, Unreadable, read_reply, unreadable
from fedalign.protocol.messages import Lost

_FEW = 64  # objects of a reply without large arrays: the message, its records, their arrays
_PIECE = 1 << 20  # bytes; Flower cuts arrays into larger pieces


@dataclass
class _Arriving:
    """A reply that the SuperLink has announced: its objects still to fetch, and those that have come.

    ``largest`` limits the bytes of its arrays. Nothing of it is decoded before all has come and is within the limits.
    """

    message: str
    missing: list[str]
    largest: int = 0
    objects: dict[str, bytes] = field(default_factory=dict)
    arrays: int = 0  # bytes
    words: int = 0  # bytes of everything else

    def add(self, content: bytes) -> None:
        """Add the object that was fetched; raises :class:`FedalignError` if the reply is too large with it.

        Decoding takes much more memory than an object has bytes: JSON of lists some 25 times as much. So only what
        becomes an array may be large, which is copied as it is.
        """
        head = content.find(b"\0") + 1
        pieces = len(content) - head if head and content.startswith(b"ArrayChunk ") else 0
        self.arrays += pieces
        self.words += len(content) - pieces
        if self.arrays > self.largest:
            raise FedalignError(f"the arrays of its reply have more than {self.largest} bytes")
        if self.words > WORDS:
            raise FedalignError(f"its reply has more than {WORDS} bytes besides arrays")
        self.objects[self.missing.pop()] = content


class Inbox:
    """Fetches the replies to messages. ``largest`` limits the bytes of a reply's arrays, where it may have any."""

    def __init__(self, grid: Grid, largest: int) -> None:
        self._grid, self._largest = grid, largest
        self._arriving: dict[str, _Arriving] = {}

    def pull(self, messages: Iterable[str], kind: str, limit: float) -> Iterator[tuple[str, RecordDict | Lost]]:
        """Give the replies that have come, checked, each with the message that it answers; others may come later.

        A reply that cannot be fetched, decoded or read is :class:`Unreadable`. What answers another message than those
        asked for, and a second reply, is left out. ``kind`` is that of the messages, and
        ``limit`` the number of seconds that nodes have.
        """
        waiting = dict.fromkeys(messages)
        largest = self._largest if ArrayRecord in RECORDS[kind].values() else 0
        over_http = isinstance(self._grid, HttpGrid)
        arrived = self._pull_parts(waiting, largest) if over_http else self._pull_whole(list(waiting))
        for number, reply in arrived:
            if number in waiting:
                del waiting[number]
                yield number, reply if isinstance(reply, Lost) else read_reply(reply, kind, limit, largest)

    def forget(self, message: str) -> None:
        """Drop what has come of the reply to a message that nobody waits for any more."""
        self._arriving.pop(message, None)

    def _pull_whole(self, messages: list[str]) -> Iterator[tuple[str, Message | Lost]]:
        """Ask a grid without a SuperLink, such as one of nodes in this process."""
        for reply in self._grid.pull_messages(messages):
            try:
                number = reply.metadata.reply_to_message_id
            except Exception:  # it is nobody's reply then
                continue
            if type(number) is str:
                yield number, reply

    def _pull_parts(self, messages: Iterable[str], largest: int) -> Iterator[tuple[str, Message | Lost]]:
        if fresh := [i for i in messages if i not in self._arriving]:
            yield from self._announced(fresh, largest)
        for number, parts in [(i, self._arriving[i]) for i in messages if i in self._arriving]:
            reply: Message | Lost | None
            try:
                reply = self._fetch(parts)
            except Exception as error:
                reply = Unreadable(str(error)) if isinstance(error, FedalignError) else unreadable(error)
            if reply is not None:
                del self._arriving[number]
                self._confirm(parts)
                yield number, reply

    def _announced(self, messages: list[str], largest: int) -> Iterator[tuple[str, Lost]]:
        """Ask which replies there are. The SuperLink tells of each once."""
        try:
            found = self._client.PullMessages(PullAppMessagesRequest(message_ids=messages))
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.INTERNAL_SERVER_ERROR:
                raise  # the run was stopped, say
            if len(messages) == 1:
                yield messages[0], Unreadable("the SuperLink cannot deliver its reply")
                return
            for one in messages:  # one of the replies is what it fails at
                yield from self._announced([one], largest)
            return
        most = _FEW + 2 * largest // _PIECE
        for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            # The SuperLink has checked this number against the node. The one inside the reply is the node's word.
            number = message.metadata.reply_to_message_id
            try:
                self._arriving[number] = _Arriving(message.metadata.message_id, _objects(tree, most), largest)
            except FedalignError as error:
                self._confirm(_Arriving(message.metadata.message_id, []))
                yield number, Unreadable(str(error))

    def _fetch(self, parts: _Arriving) -> Message | None:
        """Fetch what the SuperLink has of a reply; None if that is not all of it yet."""
        while parts.missing:
            asked = PullObjectRequest(node=self._http.node, run_id=self._run, object_id=parts.missing[-1])
            answer = self._client.PullObject(asked)
            if not answer.object_found:
                raise FedalignError("its reply was announced, and not sent")
            if not answer.object_available:
                return None
            parts.add(answer.object_content)
        check_expansion(parts.objects, parts.largest)
        message = inflate_object_from_contents(parts.message, parts.objects)
        if not isinstance(message, Message):
            raise FedalignError("its reply is not a message")
        return message

    def _confirm(self, parts: _Arriving) -> None:
        """Let the SuperLink drop the reply."""
        asked = ConfirmMessageReceivedRequest(node=self._http.node, run_id=self._run, message_object_id=parts.message)
        with contextlib.suppress(httpx.HTTPError):  # it drops the reply later then, at the end of the run
            self._client.ConfirmMessageReceived(asked)

    @property
    def _http(self) -> HttpGrid:
        assert isinstance(self._grid, HttpGrid)
        return self._grid

    @property
    def _client(self) -> Any:
        return self._http._runtime_client

    @property
    def _run(self) -> int:
        return int(self._http.run.run_id)


def check_expansion(objects: dict[str, bytes], largest: int) -> None:
    """Refuse a reply whose arrays name the same piece again and again, to grow when they are put together.

    Raises :class:`FedalignError` if its arrays have more than ``largest`` bytes in total.

    >>> objects = {"a": b"ArrayChunk  4\\0abcd", "b": b'Array a 26\\0{"arraychunk_ids": [0, 0, 0]}'}
    >>> check_expansion(objects, largest=12)
    >>> check_expansion(objects, largest=11)
    Traceback (most recent call last):
    ...
    fedalign.errors.FedalignError: the arrays of its reply have more than 11 bytes
    """
    total = 0
    for content in objects.values():
        kind, pieces, _ = get_object_head_values_from_object_content(content)
        if kind == "Array":
            sizes = [len(_body(objects[piece])) for piece in pieces]
            total += sum(sizes[i] for i in json.loads(bytes(_body(content)))["arraychunk_ids"])
    if total > largest:
        raise FedalignError(f"the arrays of its reply have more than {largest} bytes")


def _body(content: bytes) -> memoryview:
    return memoryview(content)[content.index(b"\0") + 1 :]


def _objects(tree: Any, most: int) -> list[str]:
    """Return the objects of a reply, each once; raises :class:`FedalignError` if there are more than ``most``."""
    found: dict[str, None] = {}
    open_ = [tree]
    while open_:
        node = open_.pop()
        found[node.object_id] = None
        if len(found) + len(open_) > most:
            raise FedalignError(f"its reply has more than {most} parts")
        open_.extend(node.children)
    return list(found)
