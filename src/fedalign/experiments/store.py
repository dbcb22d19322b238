"""One run's folder: rounds as they happen, a checkpoint that survives a kill, and the final weights.

After every round the line is flushed first, then the checkpoint replaces the old one, which is kept as ``previous``.
Both are on disk before a checkpoint counts, so a power failure loses no round that has one.
A checkpoint is a safetensors file: the snapshot's tensors by name, and a small JSON. It knows how long ``rounds.jsonl``
was, so what a killed run wrote after it is cut off on resume. It carries checksums of itself and of the log up to
there, so damage is noticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fedalign.callbacks import Stopped
from fedalign.errors import DivergedError, FedalignError
from fedalign.experiments.durable_files import sync_file
from fedalign.experiments.round_order import check_length, check_order, rounds_in
from fedalign.experiments.tensor_files import digest, replace_tensors, separate
from fedalign.protocol.messages import Snapshot
from fedalign.protocol.records import History, RoundRecord

FORMAT = "2"  #: of checkpoints; version 0.1 wrote none


@dataclass(frozen=True)
class Checkpoint:
    """Where a run can go on: its snapshot, the length of the log then, and the record of the round before."""

    snapshot: Snapshot
    offset: int
    last: RoundRecord | None
    path: Path

    @property
    def rounds(self) -> int:
        """How many rounds are done."""
        return self.snapshot.round


@dataclass(frozen=True)
class Mark:
    """How far a log goes: the rounds in it, its length in bytes, and their checksum."""

    rounds: int
    offset: int
    digest: str


class RunStore:
    """Writes and reads ``ARM/seed-S``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "rounds.jsonl"
        self.model = folder / "model.safetensors"
        self._latest = folder / "checkpoint.safetensors"
        self._previous = folder / "checkpoint-previous.safetensors"
        self.best = folder / "best.safetensors"
        self._diverged = folder / "diverged.json"
        self._stopped = folder / "stopped.json"
        self._clients = folder / "clients.json"
        self._log_digest: Any = None  # of what is in the log; None: not read yet

    def is_empty(self) -> bool:
        """Tell whether no run has written here."""
        return not any(p.exists() for p in (self.log, self.model, self._latest, self._previous, self._diverged))

    def append(self, record: RoundRecord) -> Mark:
        """Write a finished round into the log; the mark says how far the log goes now."""
        if self._log_digest is None:
            self._log_digest = hashlib.sha256(self.log.read_bytes() if self.log.exists() else b"")
        line = record.to_json().encode() + b"\n"
        with self.log.open("ab") as file:
            file.write(line)
            file.flush()
            offset = file.tell()
        self._log_digest.update(line)
        return Mark(record.round + 1, offset, self._log_digest.hexdigest())

    def checkpoint(self, mark: Mark, snapshot: Snapshot) -> None:
        """Store the snapshot that belongs to a mark. The log up to there, and the checkpoint, are then on disk."""
        tensors = separate(snapshot.tensors)
        info = {
            "format": FORMAT,
            "rounds": str(mark.rounds),
            "offset": str(mark.offset),
            "log": mark.digest,
            "values": json.dumps(snapshot.values),
            "tensors": digest(tensors),
        }
        sync_file(self.log)
        # In one text: safetensors writes several in a random order, and the same run shall give the same bytes.
        replace_tensors(tensors, self._latest, {"fedalign": json.dumps(info)}, keep=self._previous)

    def checkpoints(self) -> tuple[list[Checkpoint], list[str]]:
        """Read the usable checkpoints, newest first, and say what is wrong with the others.

        Raises :class:`FedalignError` for a checkpoint of version 0.1.
        """
        good, said = [], []
        for path in (self._latest, self._previous):
            if not path.exists():
                continue
            try:
                good.append(self._read_checkpoint(path))
            except FedalignError:
                raise
            except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
                said.append(f"{path} cannot be used ({error})")
        return good, said

    def rewind(self, checkpoint: Checkpoint | None) -> None:
        """Cut the log back to a checkpoint, or start afresh. Checkpoints that aren't used are removed."""
        self._log_digest = None
        for path in (self._latest, self._previous):
            # The one before the newest stays as its fallback; one that is damaged or too new must not become it.
            if checkpoint is None or (path == self._latest and checkpoint.path != path):
                path.unlink(missing_ok=True)
        if checkpoint is None:
            self.log.unlink(missing_ok=True)
            return
        with self.log.open("r+b") as file:
            file.truncate(checkpoint.offset)

    def history(self) -> History:
        """Read the rounds written so far; a last line that a kill cut short is left out."""
        if not self.log.exists():
            return History()
        records = []
        for number, line in enumerate(self.log.read_bytes().split(b"\n")[:-1], start=1):
            try:
                records.append(RoundRecord.from_json(line))
            except (ValueError, KeyError, TypeError) as error:
                raise FedalignError(f"{self.log}, line {number} is damaged: {error}") from error
        check_order(self.log, [record.round for record in records])
        return History(records)

    def check_order(self) -> None:
        """Refuse a log in which rounds are repeated or missing; checkpoints notice damaged lines."""
        check_order(self.log, rounds_in(self.log))

    def whole_history(self) -> History:
        """Read the rounds, and refuse a log with fewer than the last checkpoint has: lines at its end are missing."""
        known = self._rounds_of_checkpoint()  # before the log, which a run under way writes first
        history = self.history()
        check_length(self.log, len(history), known)
        return history

    def _rounds_of_checkpoint(self) -> int:
        try:
            with safe_open(self._latest, framework="pt") as file:
                return int(_info(file.metadata() or {})["rounds"])
        except (SafetensorError, OSError, KeyError, ValueError):
            return 0  # a resume says what is wrong with it

    def diverged(self) -> str | None:
        """Say how this run diverged, if it did."""
        if not self._diverged.exists():
            return None
        try:
            return str(json.loads(self._diverged.read_bytes())["message"])
        except (ValueError, KeyError, TypeError):
            return f"diverged (how can't be read: {self._diverged} is damaged)"

    def mark_diverged(self, error: DivergedError) -> None:
        """Remember that this run ended early, so that a resume doesn't repeat it."""
        what = {"round": error.round, "clients": error.clients, "message": str(error)}
        write_atomically(self._diverged, json.dumps(what, indent=1) + "\n")

    def stopped(self) -> Stopped | None:
        """Say why and when a callback stopped this run, if one did."""
        if not self._stopped.exists():
            return None
        try:
            found = json.loads(self._stopped.read_bytes())
            return Stopped(int(found["round"]), str(found["reason"]))
        except (ValueError, KeyError, TypeError) as error:
            raise FedalignError(f"{self._stopped} is damaged: {error}") from error

    def mark_stopped(self, stopped: Stopped | None) -> None:
        """Remember that this run stopped early, so that a resume leaves it as it is; None: forget it."""
        if stopped is None:
            self._stopped.unlink(missing_ok=True)
        else:
            write_atomically(self._stopped, json.dumps(dataclasses.asdict(stopped), indent=1) + "\n")

    def save_best(self, tensors: dict[str, torch.Tensor], about: dict[str, str]) -> None:
        """Write the weights of the best round, with what is known about it."""
        replace_tensors(tensors, self.best, about)

    def save_model(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write the final weights."""
        replace_tensors(tensors, self.model)

    def personal(self, method: str) -> Path:
        """Return the file of the personal models that the clients made by a method."""
        return self.folder / f"personal-{method}.safetensors"

    def save_personal(self, method: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write the clients' personal models."""
        replace_tensors(tensors, self.personal(method))

    def save_clients(self, clients: Sequence[dict[str, Any]]) -> None:
        """Write the final model's accuracy and loss on every client's own test data."""
        write_atomically(self._clients, json.dumps(list(clients), indent=1, allow_nan=False) + "\n")

    def clients(self) -> list[dict[str, Any]]:
        """Read the final model's accuracy and loss on every client's own test data; nothing if that wasn't written."""
        if not self._clients.exists():
            return []
        try:
            return list(json.loads(self._clients.read_bytes()))
        except (ValueError, TypeError) as error:
            raise FedalignError(f"{self._clients} is damaged: {error}") from error

    def _read_checkpoint(self, path: Path) -> Checkpoint:
        with safe_open(path, framework="pt") as file:
            info = _info(file.metadata() or {})
            if "format" not in info and "state" in info:
                raise FedalignError(
                    f"{path} was written by fedalign 0.1, whose checkpoints this version cannot read: "
                    "finish that run with fedalign 0.1, or start it again in another folder"
                )
            if info["format"] != FORMAT:
                raise ValueError(f"its format {info['format']!r} is not known to this version")
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        if info["tensors"] != digest(tensors):
            raise ValueError("its checksum doesn't match")
        rounds, offset = int(info["rounds"]), int(info["offset"])
        with self.log.open("rb") as log:
            before = log.read(offset)
        if len(before) < offset or hashlib.sha256(before).hexdigest() != info["log"]:
            raise ValueError(f"{self.log.name} has changed since")
        last = RoundRecord.from_json(before.splitlines()[-1]) if before else None
        return Checkpoint(Snapshot(rounds, tensors, json.loads(info["values"])), offset, last, path)


def write_atomically(path: Path, text: str) -> None:
    """Write a text so that a reader, or a kill, meets the old file or the new one, never half of it."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _info(metadata: dict[str, str]) -> dict[str, str]:
    """Return what a checkpoint says about itself; the first ones of this format had a text for each key."""
    return dict(json.loads(metadata["fedalign"])) if "fedalign" in metadata else metadata
