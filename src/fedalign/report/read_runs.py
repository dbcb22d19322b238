"""Reads a run's folder back."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.experiments.store import RunStore
from fedalign.protocol.records import History


@dataclass(frozen=True)
class RunFolder:
    """What a folder holds: settings, summary, and the history of every arm and seed."""

    folder: Path
    settings: dict[str, Any]
    summary: dict[str, Any]
    histories: dict[str, dict[int, History]]
    clients: dict[str, dict[int, list[dict[str, Any]]]]  #: the final models on every client's test data

    @property
    def name(self) -> str:
        """The experiment's name."""
        return str(self.settings["name"])


def read_run(folder: Path) -> RunFolder:
    """Read a finished run."""
    for name in ("config.toml", "summary.json"):
        if not (folder / name).is_file():
            what = "is not a run's folder" if name == "config.toml" else "holds an unfinished run (go on with --resume)"
            raise FedalignError(f"{folder} {what}: there is no {name} in it")
    try:
        settings = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        stores = {
            arm: {seed: RunStore(folder / arm / f"seed-{seed}") for seed in summary["seeds"]} for arm in summary["arms"]
        }
        histories = {arm: {seed: store.history() for seed, store in own.items()} for arm, own in stores.items()}
        clients = {arm: {seed: store.clients() for seed, store in own.items()} for arm, own in stores.items()}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise FedalignError(f"{folder} is damaged: {type(error).__name__}: {error}") from error
    return RunFolder(folder, settings, summary, histories, clients)
