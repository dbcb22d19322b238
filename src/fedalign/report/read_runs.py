"""Reads the output folder of a run, finished or not, for reports and comparisons."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.experiments.additions import seed_list
from fedalign.experiments.run_layout import RunLayout
from fedalign.protocol.records import History
from fedalign.report.same_clients import with_same_clients
from fedalign.report.unfinished import begun, summary_so_far, what_is_missing


@dataclass(frozen=True)
class RunFolder:
    """The content of a run's folder: settings, summary, and the history of every arm and seed."""

    folder: Path
    settings: dict[str, Any]
    summary: dict[str, Any]
    histories: dict[str, dict[int, History]]
    #: by arm and seed: the accuracy of the final model on each client's test data
    clients: dict[str, dict[int, list[dict[str, Any]]]]
    missing: tuple[str, ...] = ()  #: what an unfinished run lacks, such as "auto, seed 1: 34 of 200 rounds"

    @property
    def name(self) -> str:
        """The name of the experiment, from ``config.toml``."""
        return str(self.settings["name"])


def read_run(folder: Path) -> RunFolder:
    """Read the folder of a run. An unfinished run is summarised as far as it goes, and ``missing`` says what it lacks.

    Raises :class:`FedalignError` if it is not a run's folder, if no round has finished, or if a file is damaged.
    """
    layout = RunLayout.read(folder)
    settings = layout.settings
    try:
        arms, seeds = settings["arms"], seed_list(settings["seeds"])
        path, summary, missing = folder / "summary.json", None, []
        if path.is_file():
            summary = json.loads(path.read_text(encoding="utf-8"))
            if set(arms) > set(summary["arms"]) or set(seeds) > set(summary["seeds"]):
                summary = None  # a resume has added arms or seeds, and has not finished
            else:
                arms, seeds = list(summary["arms"]), summary["seeds"]
        stores = layout.stores(arms, seeds)
        histories = {
            arm: {seed: with_same_clients(store.whole_history()) for seed, store in own.items()}
            for arm, own in stores.items()
        }
        if summary is None:
            missing = what_is_missing(stores, histories, settings["rounds"])
            histories = begun(folder, histories)
            summary = summary_so_far(settings, stores, histories)
        clients = {arm: {seed: stores[arm][seed].clients() for seed in own} for arm, own in histories.items()}
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise FedalignError(f"{folder} is damaged: {type(error).__name__}: {error}") from error
    return RunFolder(folder, settings, summary, histories, clients, tuple(missing))
