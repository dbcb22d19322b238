"""One run's folder: rounds as they happen, a checkpoint that survives a kill, and the final weights.

After every round the line is flushed first, then the checkpoint replaces the old one, which is kept as ``previous``.
A checkpoint knows how long ``rounds.jsonl`` was, so what a killed run wrote after it is cut off on resume, and it
carries a checksum, so a damaged one is noticed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedalign.errors import DivergedError
from fedalign.history import History, RoundRecord


@dataclass(frozen=True)
class Checkpoint:
    """Where a run can go on: after ``rounds`` rounds, with ``state`` (flat weights), at ``offset`` of the log."""

    rounds: int
    offset: int
    state: torch.Tensor


class RunStore:
    """Writes and reads ``ARM/seed-S``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "rounds.jsonl"
        self.model = folder / "model.safetensors"
        self._latest = folder / "checkpoint.safetensors"
        self._previous = folder / "checkpoint-previous.safetensors"
        self._diverged = folder / "diverged.json"

    def append(self, record: RoundRecord, state: torch.Tensor) -> None:
        """Store a finished round."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
            file.flush()
            offset = file.tell()
        state = state.detach().cpu().contiguous()
        info = {"rounds": str(record.round + 1), "offset": str(offset), "sha256": _digest(state)}
        fresh = self._latest.with_suffix(".new")
        save_file({"state": state}, fresh, info)
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
                checkpoint = _read_checkpoint(path)
            except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
                said.append(f"{path} is damaged ({error})")
                continue
            if self._log_reaches(checkpoint):
                good.append(checkpoint)
            else:
                said.append(f"{self.log} ends before the round that {path.name} was written after")
        return good, said

    def rewind(self, checkpoint: Checkpoint | None) -> None:
        """Cut the log back to a checkpoint, or start afresh."""
        if checkpoint is None:
            for path in (self.log, self._latest, self._previous):
                path.unlink(missing_ok=True)
            return
        with self.log.open("r+b") as file:
            file.truncate(checkpoint.offset)

    def history(self) -> History:
        """Read the rounds written so far; a last line that a kill cut short is left out."""
        if not self.log.exists():
            return History()
        lines = self.log.read_bytes().split(b"\n")
        return History([RoundRecord.from_json(line) for line in lines[:-1]])

    def diverged(self) -> str | None:
        """Say how this run diverged, if it did."""
        return str(json.loads(self._diverged.read_text())["message"]) if self._diverged.exists() else None

    def mark_diverged(self, error: DivergedError) -> None:
        """Remember that this run ended early, so that a resume doesn't repeat it."""
        text = json.dumps({"round": error.round, "clients": error.clients, "message": str(error)}, indent=1)
        self._diverged.write_text(text + "\n", encoding="utf-8")

    def save_model(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write the final weights."""
        fresh = self.model.with_suffix(".new")
        save_file(tensors, fresh)
        fresh.replace(self.model)

    def _log_reaches(self, checkpoint: Checkpoint) -> bool:
        if not self.log.exists() or self.log.stat().st_size < checkpoint.offset:
            return False
        with self.log.open("rb") as file:
            return file.read(checkpoint.offset).count(b"\n") == checkpoint.rounds


def _read_checkpoint(path: Path) -> Checkpoint:
    with safe_open(path, framework="pt") as file:
        info = file.metadata() or {}
        state = file.get_tensor("state")
    if info["sha256"] != _digest(state):
        raise ValueError("its checksum doesn't match")
    return Checkpoint(int(info["rounds"]), int(info["offset"]), state)


def _digest(state: torch.Tensor) -> str:
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()
