"""Continues the runs of an output folder: what may differ, where each run goes on, and what is left of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.experiments.additions import without_additions
from fedalign.experiments.config import Experiment, load_settings
from fedalign.experiments.config_file import check_same, read_settings
from fedalign.experiments.store import Checkpoint, RunStore
from fedalign.simulation.spec import RunSpec


def check_settings(experiment: Experiment, folder: Path, settings: dict[str, Any]) -> list[str]:
    """Compare the settings of a folder's run with those to continue with; returns notes for the user.

    More arms and seeds are no difference. Raises :class:`FedalignError` if there is no run, or one of other settings.
    """
    if not (folder / "config.toml").exists():
        raise FedalignError(f"{folder} holds no run to resume (there is no config.toml in it)")
    read_settings(folder)
    # Read as an experiment, settings that are newer than the run have their defaults.
    before, _ = load_settings(str(folder / "config.toml"), folder=experiment.folder)
    return check_same(folder, before, without_additions(before, settings))


def has_grown(folder: Path, now: Mapping[str, Any]) -> bool:
    """Say whether a resume adds arms or seeds to those of ``config.toml``."""
    held = read_settings(folder)
    return any(held.get(key) != now[key] for key in ("arms", "seeds"))


def common_points(stores: Sequence[RunStore], *, continue_stopped: bool) -> tuple[list[Checkpoint | None], list[str]]:
    """Find where each run goes on. All go on from the same round if they can, as in an uninterrupted run.

    Runs that diverged or stopped early do not hold the others back.
    """
    usable, notes = [], []
    for store in stores:
        store.check_order()
        good, said = store.checkpoints()
        usable.append(good)
        if said:
            onward = f"going on from round {good[0].rounds}" if good else "this run starts again"
            notes += [f"{message}; {onward}" for message in said]
    counted = [
        good[0].rounds if good else 0
        for good, store in zip(usable, stores, strict=True)
        if not store.is_empty()  # those that the resume adds start by themselves
        and not store.diverged()
        and (continue_stopped or not store.stopped())
    ]
    common = min(counted, default=0)
    points: list[Checkpoint | None] = []
    for good, store in zip(usable, stores, strict=True):
        same = [point for point in good if point.rounds == common and not store.stopped()]
        points.append(same[0] if same else good[0] if good else None)
    return points, notes


def rest_of(point: Checkpoint | None, spec: RunSpec, store: RunStore, *, continue_stopped: bool) -> RunSpec:
    """Describe the rest of a run; one that stopped early has none, unless it is to be continued."""
    if point is None:
        return spec
    stopped = None if continue_stopped else store.stopped()
    if stopped is not None and stopped.round + 1 != point.rounds:  # its last checkpoint is damaged: it stops again
        stopped = None
    past = store.history().rounds[: point.rounds]
    return dataclasses.replace(spec, snapshot=point.snapshot, last=point.last, past=past, stopped=stopped)


def earlier_seconds(folder: Path) -> float:
    """Return how long the runs in a folder took before; 0 if that is not known."""
    try:
        return float(json.loads((folder / "summary.json").read_bytes())["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0  # the run never finished, or its summary is damaged and is about to be written again
