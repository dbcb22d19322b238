"""Reads runs that are still going on: what is new since the last look, without touching their folders."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.experiments.additions import seed_list
from fedalign.experiments.run_layout import RunLayout
from fedalign.protocol.records import History, RoundRecord
from fedalign.report.read_runs import RunFolder
from fedalign.report.same_clients import with_same_clients
from fedalign.report.unfinished import summary_so_far


@dataclass
class Log:
    """One ``rounds.jsonl`` as far as it was read: bytes up to ``offset`` are in ``rounds``."""

    path: Path
    offset: int = 0
    rounds: list[RoundRecord] = field(default_factory=list)

    def read(self) -> None:
        """Read the lines that were added. A log that became shorter, as on a resume, is read again from the start.

        A last line that is not complete yet is left for the next time. Raises :class:`FedalignError` if a line is
        damaged.
        """
        if not self.path.exists():
            self.offset, self.rounds = 0, []
            return
        if not self._read_on():
            self.offset, self.rounds = 0, []
            if not self._read_on():
                raise FedalignError(f"{self.path}, line {len(self.rounds) + 1} is damaged or out of order")

    def _read_on(self) -> bool:
        """Read on; returns False if the log does not continue what was read before."""
        if self.path.stat().st_size < self.offset:
            return False
        with self.path.open("rb") as file:
            file.seek(self.offset)
            fresh = file.read()
        for line in fresh.split(b"\n")[:-1]:
            try:
                record = RoundRecord.from_json(line)
            except (ValueError, KeyError, TypeError):
                return False
            if record.round != len(self.rounds):
                return False
            self.rounds.append(record)
            self.offset += len(line) + 1
        return True


class FollowedRun:
    """A run's folder that is looked at again and again, while a run writes into it or after it has ended."""

    def __init__(self, folder: Path) -> None:
        RunLayout.read(folder)  # a folder without runs is reported at once
        self.folder = folder
        self._logs: dict[Path, Log] = {}

    def mark(self) -> tuple[tuple[str, int, int], ...]:
        """Return what changes when the folder's content does: sizes and times of the files that are read."""
        paths = [
            self.folder / "config.toml",
            self.folder / "summary.json",
            *RunLayout.read(self.folder).files(),
        ]
        found = ((path, path.stat()) for path in paths if path.exists())
        return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found)

    def read(self) -> RunFolder:
        """Read the folder as it is now. A summary is computed from the rounds so far if the run has none yet."""
        layout = RunLayout.read(self.folder)
        settings = layout.settings
        written = self._summary()
        arms, seeds = list(settings["arms"]), seed_list(settings["seeds"])
        if written is not None and (list(written["arms"]), written["seeds"]) != (arms, seeds):
            written = None  # it is that of the run before it was extended
        stores = layout.stores(arms, seeds)
        histories = {
            arm: {seed: self._history(store.log) for seed, store in own.items()} for arm, own in stores.items()
        }
        clients = {arm: {seed: store.clients() for seed, store in own.items()} for arm, own in stores.items()}
        summary = written or summary_so_far(settings, stores, histories)
        return RunFolder(self.folder, settings, summary, histories, clients)

    def _history(self, path: Path) -> History:
        log = self._logs.setdefault(path, Log(path))
        log.read()
        return with_same_clients(History(list(log.rounds)))

    def _summary(self) -> dict[str, Any] | None:
        path = self.folder / "summary.json"
        if not path.is_file():
            return None
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise FedalignError(f"{path} is damaged: {error}") from error
