"""Reads the output folder of a finished run, for reports and comparisons."""

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
    """The content of a run's folder: settings, summary, and the history of every arm and seed."""

    folder: Path
    settings: dict[str, Any]
    summary: dict[str, Any]
    histories: dict[str, dict[int, History]]
    #: by arm and seed: the accuracy of the final model on each client's test data
    clients: dict[str, dict[int, list[dict[str, Any]]]]

    @property
    def name(self) -> str:
        """The name of the experiment, from ``config.toml``."""
        return str(self.settings["name"])


def read_run(folder: Path) -> RunFolder:
    """Read the folder of a finished run.

    Raises :class:`FedalignError` if it is not a run's folder, if the run is unfinished, or if a file is damaged.
    """
    if not (folder / "config.toml").is_file():
        raise FedalignError(f"{folder} is not a run's folder: it has no config.toml")
    if not (folder / "summary.json").is_file():
        raise FedalignError(f"{folder} holds an unfinished run: it has no summary.json; finish the run with --resume")
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
