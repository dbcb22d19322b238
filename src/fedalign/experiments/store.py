"""One run's folder: rounds as they happen, a checkpoint that survives a kill, and the final weights.

After every round the line is flushed first, then the checkpoint replaces the old one, which is kept as ``previous``.
A checkpoint knows how long ``rounds.jsonl`` was, so what a killed run wrote after it is cut off on resume, and it
carries checksums of itself and of the log up to there, so damage is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedalign.errors import DivergedError, FedalignError
from fedalign.protocol.records import History, RoundRecord


@dataclass(frozen=True)
class Checkpoint:
    """Where a run can go on: after ``rounds`` rounds, with ``state`` (flat weights), at ``offset`` of the log.

    ``last`` is the record of the round before.
    """

    rounds: int
    offset: int
    state: torch.Tensor
    last: RoundRecord | None
    path: Path


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
        self._diverged = folder / "diverged.json"
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

    def checkpoint(self, mark: Mark, state: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Store the state that belongs to a mark, as a tensor or as its rows (which need not be copied together)."""
        tensors = [state] if isinstance(state, torch.Tensor) else list(state)
        tensors = [t.detach().cpu().contiguous() for t in tensors]
        info = {
            "rounds": str(mark.rounds),
            "offset": str(mark.offset),
            "log": mark.digest,
            "state": _digest(tensors),
        }
        names = ["state"] if isinstance(state, torch.Tensor) else [f"state-{row}" for row in range(len(tensors))]
        fresh = self._latest.with_suffix(".new")
        save_file(dict(zip(names, tensors, strict=True)), fresh, info)
        if self._latest.exists():
            self._latest.replace(self._previous)
        fresh.replace(self._latest)

    def checkpoints(self) -> tuple[list[Checkpoint], list[str]]:
        """Read the usable checkpoints, newest first, and say what is wrong with the others."""
        good, said = [], []
        for path in (self._latest, self._previous):
            if not path.exists():
                continue
            try:
                good.append(self._read_checkpoint(path))
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
        return History(records)

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

    def save_model(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write the final weights."""
        fresh = self.model.with_suffix(".new")
        save_file(tensors, fresh)
        fresh.replace(self.model)

    def save_clients(self, clients: Sequence[dict[str, Any]]) -> None:
        """Write how the final model does on every client's own test data."""
        write_atomically(self._clients, json.dumps(list(clients), indent=1, allow_nan=False) + "\n")

    def clients(self) -> list[dict[str, Any]]:
        """Read how the final model does on every client's own test data; nothing if that wasn't written."""
        if not self._clients.exists():
            return []
        try:
            return list(json.loads(self._clients.read_bytes()))
        except (ValueError, TypeError) as error:
            raise FedalignError(f"{self._clients} is damaged: {error}") from error

    def _read_checkpoint(self, path: Path) -> Checkpoint:
        with safe_open(path, framework="pt") as file:
            info = file.metadata() or {}
            names = set(file.keys())
            if "state" in names:
                state = file.get_tensor("state")
            else:
                first = file.get_tensor("state-0")
                state = first.new_empty(len(names), *first.shape)
                for row in range(len(names)):
                    state[row] = file.get_tensor(f"state-{row}")
        if info["state"] != _digest([state]):
            raise ValueError("its checksum doesn't match")
        rounds, offset = int(info["rounds"]), int(info["offset"])
        with self.log.open("rb") as log:
            before = log.read(offset)
        if len(before) < offset or hashlib.sha256(before).hexdigest() != info["log"]:
            raise ValueError(f"{self.log.name} isn't as it was then")
        last = RoundRecord.from_json(before.splitlines()[-1]) if before else None
        return Checkpoint(rounds, offset, state, last, path)


def write_atomically(path: Path, text: str) -> None:
    """Write a text so that a reader, or a kill, meets the old file or the new one, never half of it."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.numpy().data)  # no copy: a state may be hundreds of megabytes
    return digest.hexdigest()
