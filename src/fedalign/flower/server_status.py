"""Writes ``status.json`` while a server runs: after every event, and every few seconds as a sign of life."""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any

from fedalign.callbacks import Callback, RunInfo, Stopped
from fedalign.errors import FedalignError
from fedalign.experiments.store import write_atomically
from fedalign.flower.exchange import Exchange
from fedalign.flower.members import Members
from fedalign.monitoring.status import NAME, ClientStatus, Quorum, Status, WaitingFor
from fedalign.protocol.messages import Snapshot
from fedalign.protocol.records import RoundRecord

log = logging.getLogger("flwr")
INTERVAL = 3.0  #: seconds between two heartbeats


class PausedError(FedalignError):
    """Raised when a run cannot go on for now; the message says why and how to continue it."""


@dataclass(frozen=True)
class Progress:
    """What the server's thread tells of the run; the thread that writes the file reads it."""

    state: str = "starting"
    round: int = 0
    note: str = ""
    attempts: int = 0
    waiting_since: float | None = None
    round_began: float | None = None
    last_round: float | None = None
    round_seconds: float | None = None
    record: RoundRecord | None = None


class ServerStatus(Callback):
    """Keeps the status of a run on disk while a ``with`` block lasts. How the block ends is the last state.

    A file that cannot be written is reported once, and does not stop the run.
    """

    needs_model = False

    def __init__(self, folder: Path, run_id: int, quorum: float, exchange: Exchange, members: Members) -> None:
        self._path, self._run, self._needed = folder / NAME, str(run_id), quorum
        self._exchange, self._members = exchange, members
        self._info = RunInfo("", 0, 0)
        self._started = time.time()
        self._progress = Progress()
        self._waited: dict[str, float] = {}
        self._ended, self._wake, self._lock = False, Event(), Lock()
        exchange.activity.on_question = self._wake.set  # the file tells soon what the server waits for
        self._thread = Thread(target=self._beat, name="status", daemon=True)
        self._failed_to_write = False

    def __enter__(self) -> ServerStatus:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join()
        if error is None:
            state = self._progress.state if self._progress.state in ("finished", "stopped") else "finished"
            self._note(state=state)
        elif isinstance(error, PausedError):
            self._note(state="paused", note=str(error))
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            self._note(state="paused", note="the server was told to end")
        else:
            self._note(state="failed", note=f"{type(error).__name__}: {error}")

    def on_start(self, run: RunInfo) -> None:
        """Take the run's plan, and the last round of a run that is continued."""
        self._info = run
        self._note(state="running", round=run.start, record=run.last, round_began=time.time())

    def waiting(self) -> None:
        """Note that the server waits for the priority clients' quorum."""
        if self._progress.state != "waiting":
            self._note(state="waiting", waiting_since=time.time())

    def running(self) -> None:
        """Note that the quorum is there."""
        self._note(state="running", waiting_since=None, round_began=time.time())

    def repeated(self, why: str, attempts: int) -> None:
        """Note that a round failed and is repeated."""
        self._note(note=f"round {self._progress.round} is repeated: {why}", attempts=attempts)

    def on_snapshot(self, record: RoundRecord, snapshot: Snapshot) -> None:
        """Note a finished round, which is on disk by now."""
        now, began = time.time(), self._progress.round_began or self._started
        self._waited = {what: round(seconds, 3) for what, seconds in self._exchange.seconds.items()}
        self._note(
            round=record.round + 1, record=record, note="", attempts=0, last_round=now, round_seconds=now - began,
            round_began=now,
        )  # fmt: skip

    def on_stop(self, stopped: Stopped) -> None:
        """Note that a callback ended the run early."""
        self._note(state="stopped", note=str(stopped))

    def on_end(self, result: Any) -> None:
        """Note the end of the run."""
        stopped: Stopped | None = result.stopped
        self._note(state="finished" if stopped is None else "stopped", note=str(stopped or ""))

    def status(self) -> Status:
        """Return the status as it is now."""
        progress, roster = self._progress, self._members.roster()
        there = {k for k in list(self._exchange.nodes) if self._members.has_reported(k)}
        missing = tuple(self._members.missing(there))
        return Status(
            state=progress.state,
            round=progress.round,
            rounds=self._info.rounds,
            rule=self._info.arm,
            run=self._run,
            started=self._started,
            heartbeat=time.time(),
            interval=INTERVAL,
            quorum=Quorum(self._needed, round(self._members.weight(there), 6), missing),
            note=progress.note,
            waiting_for=self._waiting_for(missing),
            round_began=progress.round_began,
            last_round=progress.last_round,
            round_seconds=progress.round_seconds,
            waited=self._waited,
            attempts=progress.attempts,
            pid=os.getpid(),
            host=socket.gethostname(),
            version=version("fedalign"),
            clients=tuple(self._client(k, samples, k in there) for k, samples in enumerate(roster.samples)),
        )

    def _waiting_for(self, missing: tuple[str, ...]) -> WaitingFor | None:
        open_ = self._exchange.activity.waiting()
        if open_ is not None:
            return WaitingFor(open_.purpose, tuple(map(self._members.name, open_.clients)), open_.since)
        since = self._progress.waiting_since
        return None if since is None else WaitingFor("quorum", missing, since)

    def _client(self, k: int, samples: int, connected: bool) -> ClientStatus:
        record = self._progress.record
        last = record.clients[k] if record is not None and k < len(record.clients) else None
        known = ClientStatus(
            k,
            self._members.name(k),
            self._members.is_priority(k),
            samples if self._members.has_reported(k) else None,
            connected,
            self._exchange.activity.last_seen(k),
        )
        if record is None or last is None:
            return known
        return replace(
            known, round=record.round, decision=last.decision, reason=last.reason, loss=last.loss,
            accuracy=last.accuracy, weight=last.weight,
        )  # fmt: skip

    def _note(self, **changes: Any) -> None:
        self._progress = replace(self._progress, **changes)
        self._write()

    def _beat(self) -> None:
        while not self._ended:
            self._wake.wait(INTERVAL)
            self._wake.clear()
            self._write()

    def _write(self) -> None:
        with self._lock:
            try:
                write_atomically(self._path, self.status().to_json())
                self._failed_to_write = False
            except Exception as error:  # whatever it is, the run goes on without a status
                if not self._failed_to_write:
                    why = error.strerror if isinstance(error, OSError) else error
                    log.warning("%s cannot be written: %s", self._path, why)
                self._failed_to_write = True
