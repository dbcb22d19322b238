"""Answers the protocol's requests over Flower's Grid."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedalign.errors import FedalignError
from fedalign.flower.members import LiveRoster
from fedalign.flower.roster_file import Entry, RosterFile
from fedalign.flower.settings import Settings
from fedalign.flower.wire import HELLO, MEASURE, TRAIN, get_measure, get_model, put_model, put_task
from fedalign.protocol.messages import (
    Combine,
    Combined,
    Compare,
    Declined,
    Evaluate,
    Lost,
    Rejected,
    Reply,
    RoundDone,
    Train,
    Update,
)
from fedalign.rules.rule import Measure
from fedalign.simulation.driver import similarities, stretched
from fedalign.simulation.engine.layout import Layout

log = logging.getLogger("flwr")
_POLL = 0.5  # seconds between looks for replies; more when they are long in coming


class BelowQuorumError(Exception):
    """Too little of the priority clients' weight answered."""


class GridDriver:
    """Knows the clients' nodes, sends them messages, and keeps the updates of the last ``Train``."""

    def __init__(self, grid: Grid, settings: Settings, roster: RosterFile, layout: Layout) -> None:
        self._grid, self._settings, self._file, self._layout = grid, settings, roster, layout
        strangers = [entry for entry in self._present().values() if entry not in roster.entries]
        entries = [*roster.entries, *sorted(strangers, key=lambda entry: entry.key)]
        self._numbers = {entry.key: k for k, entry in enumerate(entries)}
        self.roster = LiveRoster.of(entries, settings.free_cap)
        self._nodes: dict[int, int] = {}
        self._received: torch.Tensor | None = None
        self._kept: dict[int, torch.Tensor] = {}
        self._ahead: dict[tuple[int, int], Measure | None] = {}
        self._of_ahead: torch.Tensor | None = None
        self.seconds: dict[str, float] = {}  # spent waiting, by what for

    def online(self) -> set[int]:
        """Find out who is connected; ask those that are new for their sample counts."""
        present = self._present()
        self._nodes = {self._numbers[e.key]: node for node, e in present.items() if e.key in self._numbers}
        new = [k for k in self._nodes if k not in self.roster.counts]
        answers = self._exchange(HELLO, {k: RecordDict({"task": ConfigRecord({"client": k})}) for k in new}, "hello")
        for k, content in answers.items():
            samples = content.get("samples") if isinstance(content, RecordDict) else None
            if not isinstance(samples, MetricRecord):
                why = content.reason if isinstance(content, Lost) else "it did not say how many samples it has"
                log.warning("%s is left out for now: %s", self.roster.names[k], why)
            elif not isinstance(samples.get("train"), int) or samples["train"] < 1:  # type: ignore[operator]
                log.warning("%s is left out: it has no training samples", self.roster.names[k])
            elif lacks := [split for split in self._needed(k) if not samples.get(split)]:
                log.warning("%s is left out: it has no %s samples", self.roster.names[k], lacks[0])
            else:
                self.roster.counts[k] = int(samples["train"])  # type: ignore[arg-type]
                log.info("%s is there, with %d training samples", self.roster.names[k], self.roster.counts[k])
        return {k for k in self._nodes if k in self.roster.counts}

    def missing(self, there: Iterable[int]) -> list[str]:
        """Name the priority clients that aren't there."""
        here = set(there)
        return [n for k, n in enumerate(self.roster.names) if self.roster.priority[k] and k not in here]

    def weight(self, clients: Iterable[int]) -> float:
        """Give the part of the priority clients' weight that some of them have; before they report, of their number."""
        some = {k for k in clients if self.roster.priority[k]}
        everyone = {k for k, priority in enumerate(self.roster.priority) if priority}
        if not everyone <= self.roster.counts.keys():
            return len(some) / len(everyone)
        return math.fsum(float(self.roster.p[k]) for k in some)

    def _needed(self, k: int) -> tuple[str, ...]:
        """Name the data that a client must have: what is matched on, and what the priority clients choose by."""
        judges = self._settings.rule == "auto" and self.roster.priority[k]
        return (self._settings.match_on, *(["heldout"] if judges else []))

    def answer(self, request: object) -> Any:
        """Answer one of the protocol's requests."""
        if isinstance(request, Evaluate):
            return self._evaluate(request)
        if isinstance(request, Train):
            return self._train(request)
        if isinstance(request, Combine):
            return self._combine(request)
        if isinstance(request, Compare):
            size, received = self._layout.trainable_size, self._received
            assert received is not None
            return similarities(lambda k: (self._kept[k] - received)[:size], request)
        assert isinstance(request, RoundDone)
        return None

    def _evaluate(self, request: Evaluate) -> list[Measure | None]:
        """Send each client all its models in one message.

        A round ends with test measures, and the next one begins with a loss: the priority clients give both at once,
        which saves an exchange.
        """
        known = [self._ahead.get((id(model), k)) for model, k in request.jobs]
        if request.split == self._settings.match_on and all(known):
            return list(known)
        models: dict[int, list[torch.Tensor]] = {}
        places = []
        for model, k in request.jobs:
            models.setdefault(k, []).append(model)
            places.append((k, len(models[k]) - 1))
        splits: str = request.split
        if request.ahead is not None:
            splits += f"+{self._settings.match_on}"
            for mine in models.values():
                if all(model is not request.ahead for model in mine):
                    mine.append(request.ahead)
        contents = {}
        for k, mine in models.items():
            content = RecordDict()
            put_model(content, torch.stack(mine))
            put_task(content, k, 0, self._settings.rounds, splits, self.roster.priority[k], None)
            contents[k] = content
        answers = self._exchange(MEASURE, contents, f"{splits} measures")

        def measure(k: int, split: str, i: int) -> Measure | None:
            answer = answers[k]
            return None if isinstance(answer, Lost) else get_measure(answer, f"{split}-{i}")

        if request.ahead is not None:
            self._of_ahead = request.ahead  # held, so that its id stays its own
            at = {k: next(i for i, model in enumerate(mine) if model is request.ahead) for k, mine in models.items()}
            self._ahead = {(id(request.ahead), k): measure(k, self._settings.match_on, i) for k, i in at.items()}
        return [measure(k, request.split, i) for k, i in places]

    def _train(self, request: Train) -> list[Reply]:
        assert request.broadcast is not None
        self._kept, self._received = {}, request.jobs[0][0]
        contents = {}
        for model, k in request.jobs:
            contents[k] = content = RecordDict()
            put_model(content, model)
            rounds, priority = self._settings.rounds, self.roster.priority[k]
            put_task(content, k, request.round, rounds, request.split, priority, request.broadcast)
        answers = self._exchange(TRAIN, contents, "training")
        replies = {k: self._read(k, answer) for k, answer in answers.items()}
        self._refuse_giants(replies)
        broken = {k: reply for k, reply in replies.items() if isinstance(reply, Update) and not reply.finite}
        if not self._enough(self._kept):
            if not self._enough([*self._kept, *broken]):
                silent = [self.roster.names[k] for k in contents if self.roster.priority[k] and k not in self._kept]
                raise BelowQuorumError(f"no update from {', '.join([*silent, *self.missing(contents)])}")
            # Nobody is missing: it is the model, which is for the protocol to see.
            broken = {k: reply for k, reply in broken.items() if not self.roster.priority[k]}
        replies |= {k: Rejected(reply.own, "its trained weights are not finite") for k, reply in broken.items()}
        return [replies[k] for _, k in request.jobs]

    def _enough(self, clients: Iterable[int]) -> bool:
        return self.weight(clients) >= self._settings.quorum - 1e-9

    def _read(self, k: int, answer: RecordDict | Lost) -> Reply:
        if isinstance(answer, Lost):
            return answer
        own = None if self.roster.priority[k] else get_measure(answer, "own")
        if own is not None and math.isnan(own.loss):
            own = None  # it could be ordered nowhere among the others'
        declined = answer.get("declined")
        if isinstance(declined, ConfigRecord):
            measure = get_measure(answer, "own")
            if measure is None:
                return Lost("it declined without a measure")
            return Declined(measure, str(declined.get("reason", ""))[:200])
        if not self.roster.priority[k] and own is None:
            return Lost("its measure of the model is missing or makes no sense")
        try:
            model = get_model(answer, self._layout.size, self._layout.dtype)
        except FedalignError as error:
            return Rejected(own, str(error))
        if not torch.isfinite(model).all():
            return Update(own=own, finite=False)
        self._kept[k] = model
        return Update(own=own)

    def _refuse_giants(self, replies: dict[int, Reply]) -> None:
        """Refuse free clients' updates that are many times longer than every priority client's."""
        if not self._settings.longest or self._received is None:
            return
        length = {k: float(torch.linalg.vector_norm((m - self._received).double())) for k, m in self._kept.items()}
        longest = max((length[k] for k in length if self.roster.priority[k]), default=0.0)
        for k in [k for k in length if not self.roster.priority[k] and longest]:
            if length[k] > self._settings.longest * longest:
                reply = replies[k]
                assert isinstance(reply, Update)
                times = f"{length[k] / longest:.3g} times as long as the longest of the priority clients"
                replies[k] = Rejected(reply.own, f"its update is {times}")
                del self._kept[k]

    def _combine(self, request: Combine) -> Combined:
        assert self._received is not None
        models, size = [], self._layout.trainable_size
        for m, mix in enumerate(request.mixes):
            total = torch.zeros_like(self._received)
            for k, weight in mix.items():
                total += stretched(self._kept[k], self._received, request.step(m, k), size) * weight
            models.append(total)
        return Combined(tuple(models))

    def _present(self) -> dict[int, Entry]:
        keys: dict[int, bytes] = {}
        for node in self._grid.get_nodes():
            if node.public_key:
                keys[int(node.node_id)] = bytes(node.public_key)
        return self._file.who(keys)

    def _exchange(self, kind: str, contents: Mapping[int, RecordDict], what: str) -> dict[int, RecordDict | Lost]:
        """Send messages and wait for the replies, as long as clients have. Replies that come later are never read."""
        found: dict[int, RecordDict | Lost] = {k: Lost("not connected") for k in contents}
        clients = [k for k in contents if k in self._nodes]
        if not clients:
            return found
        began, limit = time.monotonic(), self._settings.timeout
        messages = [Message(contents[k], self._nodes[k], kind, ttl=limit) for k in clients]
        ids = list(self._grid.push_messages(messages))
        waiting = {i: k for i, k in zip(ids, clients, strict=False) if i}
        for k in clients:
            found[k] = Lost(f"no answer in {limit:g} s" if k in waiting.values() else "the message could not be sent")
        pause = _POLL
        while waiting:
            late = time.monotonic() - began >= limit  # even then, look once more
            for reply in self._grid.pull_messages(list(waiting)):
                # An error reply comes from the SuperLink, not from the node: what it replies to tells whose it is.
                k = waiting.pop(reply.metadata.reply_to_message_id, -1)
                if k >= 0:
                    found[k] = _content(reply, limit)
            if late:
                break
            if waiting:
                time.sleep(pause)
                pause = min(1.0, pause * 1.1)
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - began
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
