"""Sends hostile replies to a real server, in one process, and checks that each is refused and none does harm."""

from __future__ import annotations

import logging
import math
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message

from fedalign.data.synth import Synth
from fedalign.errors import FedalignError
from fedalign.experiments.store import RunStore
from fedalign.flower.hostile_replies import hostile_reply
from fedalign.flower.local_grid import LocalGrid
from fedalign.flower.node import ClientData
from fedalign.flower.roster_file import Entry, RosterFile, fingerprint
from fedalign.flower.server_app import Server
from fedalign.flower.settings import Settings
from fedalign.flower.texts import plain_text
from fedalign.flower.wire import HELLO, TRAIN
from fedalign.protocol.records import RoundRecord

_PRIORITY, _HOSTILE = 2, 400
_ROUNDS = 8  # of a federation; after that most hostile nodes are benched
_DATA = Synth(priority=_PRIORITY, free=1, samples=40, test_samples=20)
_TURNED_AWAY = ("refused", "lost", "declined", "absent")


def model() -> torch.nn.Module:
    """Make the model of the federation under attack."""
    return torch.nn.Linear(60, 10)


def data(node_config: Mapping[str, Any]) -> ClientData:
    """Give a node its data; all hostile nodes have the same."""
    federation = _DATA.federation(seed=0)
    client, pool = federation.clients[min(int(node_config["partition-id"]), _PRIORITY)], federation.pool
    rows = client.rows("train"), client.rows("heldout"), client.rows("test")
    train, heldout, test = ((pool.x[of_split], pool.y[of_split]) for of_split in rows)
    return ClientData(train=train, heldout=heldout, test=test)


@dataclass
class FuzzReport:
    """What became of the hostile replies: ``outcomes`` counts them by change and decision."""

    replies: int = 0
    rounds: int = 0
    seconds: float = 0.0
    megabytes: float = 0.0  #: by which the process grew from the second round to the last; the attackers are in it
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  #: malformed replies that were not turned away, and odd texts

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        width = max(map(len, self.outcomes), default=0)
        table = [
            f"{change:<{width}}  " + ", ".join(f"{n} {decision}" for decision, n in sorted(counts.items()))
            for change, counts in sorted(self.outcomes.items())
        ]
        return [
            *table,
            f"{self.replies} hostile replies in {self.rounds} rounds and {self.seconds:.0f} s: the server went on, "
            f"memory grew by {self.megabytes:.0f} MB, {len(self.failures)} failures",
            *self.failures[:10],
        ]


def fuzz(replies: int = 10_000, seed: int = 0, trust: str = "report") -> FuzzReport:
    """Run a federation of two honest priority nodes and 400 hostile free nodes until so many hostile replies came.

    Returns a report; an exception is one that the server raised, which must not happen.
    """
    if replies < 1:
        raise FedalignError(f"the number of replies must be at least 1, not {replies}")
    report, draw = FuzzReport(), random.Random(seed)
    while report.replies < replies:  # nodes that are benched, or whose hello was hostile, send fewer
        with tempfile.TemporaryDirectory(prefix="fedalign-fuzz-") as name:
            _Attack(Path(name), replies - report.replies, draw, trust).run(report)
    return report


class _Attack:
    """The federation: what each hostile node sent in which round, and what the server wrote about it."""

    def __init__(self, folder: Path, replies: int, draw: random.Random, trust: str) -> None:
        self._folder, self._draw = folder, draw
        self._honest: dict[tuple[int, str], Message] = {}
        self._changes: dict[tuple[int, int], str] = {}  # by round and node
        self._round, self._sizes = 0, list[float]()
        nodes = {k: {"partition-id": k} for k in range(_PRIORITY + _HOSTILE)}
        rounds = min(_ROUNDS, 2 + math.ceil(1.02 * replies / _HOSTILE))
        config: dict[str, Any] = {
            "model": f"{__name__}:model", "data": f"{__name__}:data", "roster": str(folder / "roster.toml"),
            "out": str(folder / "out"), "rounds": rounds, "warmup": 0.0, "rule": "fedalign",
            "epsilon": 100.0, "trust": trust, "timeout": 0.1, "wait": 0.0, "metrics": "f1",
        }  # fmt: skip
        self._grid = LocalGrid({k + 1: config for k, config in nodes.items()}, config, answer=self._answer)
        entries = (Entry(fingerprint(key), f"node-{k}", k <= _PRIORITY) for k, key in self._grid.keys.items())
        RosterFile(tuple(entries)).write(folder / "roster.toml")
        self._settings = Settings.read(config)

    def run(self, report: FuzzReport) -> None:
        """Run the federation, and add to the report what came of the replies."""
        began = time.monotonic()
        log, said = logging.getLogger("flwr"), _Said()
        log.addHandler(said)
        try:
            Server(self._grid, self._settings, run_id=1).run()
        finally:
            log.removeHandler(said)
        report.failures += [f"the log has {plain_text(line)!r}" for line in said.odd]
        for record in RunStore(self._folder / "out").history().rounds:
            self._judge(record, report)
        report.seconds += time.monotonic() - began
        report.megabytes += self._sizes[-1] - self._sizes[min(_PRIORITY, len(self._sizes) - 1)]

    def _answer(self, node: int, message: Message, answer: Callable[[], Message]) -> Any:
        kind = message.metadata.message_type
        if node <= _PRIORITY:
            if kind == TRAIN:
                task: Any = message.content["task"]
                self._round = int(task["round"])
                self._sizes.append(_largest_size())
            return answer()
        if (self._round, kind) not in self._honest:
            self._honest[self._round, kind] = answer()  # a real reply, which the hostile ones are made from
        if kind == HELLO and self._round == 0:
            return Message(self._honest[0, kind].content, reply_to=message)  # to be asked at all
        name, reply = hostile_reply(self._honest[self._round, kind], message, self._draw)
        if kind == TRAIN:
            self._changes[self._round, node] = name
        return reply

    def _judge(self, record: RoundRecord, report: FuzzReport) -> None:
        report.rounds += 1
        for node in range(_PRIORITY + 1, _PRIORITY + 1 + _HOSTILE):
            client, change = record.clients[node - 1], self._changes.get((record.round, node))
            if change is None:
                continue  # it was benched, because some hostile replies are none
            report.replies += 1
            report.outcomes.setdefault(change, Counter())[client.decision] += 1
            if client.decision not in _TURNED_AWAY and not change.startswith("lie"):
                report.failures.append(f"round {record.round}: {change} was {client.decision}")
            if not client.reason or plain_text(client.reason, 300) != client.reason:
                report.failures.append(f"round {record.round}: the reason is {plain_text(client.reason)!r}")


class _Said(logging.Handler):
    """Collects lines of the log that a terminal would obey, or that are very long."""

    def __init__(self) -> None:
        super().__init__()
        self.odd: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if plain_text(line, 1000) != line.strip():
            self.odd.append(line)


def _largest_size() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
