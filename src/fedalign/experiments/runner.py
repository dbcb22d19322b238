"""Runs an experiment into a folder: checked first, written as it happens, and resumable."""

from __future__ import annotations

import dataclasses
import json
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch

from fedalign.errors import FedalignError
from fedalign.experiments.config import Experiment
from fedalign.experiments.store import Checkpoint, RunStore
from fedalign.experiments.summary import summarise
from fedalign.history import History, RoundRecord
from fedalign.protocol import RoundDone
from fedalign.simulation.api import Alone, RunSpec, Simulation, SimulationResult, resolve_device


@dataclass
class Prepared:
    """An experiment that is ready to run: everything has been checked, nothing has been written."""

    experiment: Experiment
    folder: Path
    resume: bool
    runs: list[tuple[str, int, RunSpec]]
    stores: list[RunStore]
    points: list[Checkpoint | None]
    device: torch.device
    simulation: Simulation | None
    live: list[int]  # indexes of the runs that still have rounds to do
    notes: list[str] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The round that the live runs go on from."""
        return min((self.runs[i][2].start for i in self.live), default=self.experiment.rounds)


@dataclass(frozen=True)
class Outcome:
    """How it ended: ``summary`` as in ``summary.json``, every run's history, and the messages of diverged runs."""

    summary: dict[str, Any]
    histories: dict[str, dict[int, History]]
    diverged: dict[str, dict[int, str]]


def prepare(experiment: Experiment, folder: Path, *, resume: bool = False, device: str = "auto") -> Prepared:
    """Check an experiment, its output folder and, to resume, its checkpoints. Writes nothing."""
    chosen = resolve_device(device)
    notes: list[str] = []
    if resume:
        notes += _check_same(experiment, folder, chosen)
    elif (folder / "config.toml").exists():
        held = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")).get("name", "an experiment")
        raise FedalignError(f"{folder} already holds a run of {held!r}; go on with --resume, or choose another --out")
    elif folder.exists() and not folder.is_dir():
        raise FedalignError(f"{folder} is a file; --out must name a folder")
    runs = experiment.specs()
    stores = [RunStore(folder / arm / f"seed-{seed}") for arm, seed, _ in runs]
    points: list[Checkpoint | None] = [None] * len(runs)
    if resume:
        points, said = _common_points(stores)
        notes += said
    runs = [(arm, seed, _from(point, spec)) for (arm, seed, spec), point in zip(runs, points, strict=True)]
    live = [
        i
        for i, ((_, _, spec), store) in enumerate(zip(runs, stores, strict=True))
        if store.diverged() is None and (spec.start < spec.rounds or not store.model.exists())
    ]
    simulation = Simulation([runs[i][2] for i in live], experiment.model, device=str(chosen)) if live else None
    return Prepared(experiment, folder, resume, runs, stores, points, chosen, simulation, live, notes)


def execute(
    prepared: Prepared, on_round: Callable[[str, int, RoundRecord], None] = lambda arm, seed, record: None
) -> Outcome:
    """Run what was prepared. ``on_round`` hears of every finished round of every run."""
    began = time.monotonic()
    experiment, folder = prepared.experiment, prepared.folder
    _open_folder(prepared)
    earlier = _earlier_seconds(folder) if prepared.resume else 0.0

    def store_round(place: int, done: RoundDone) -> None:
        i = prepared.live[place]
        arm, seed, _ = prepared.runs[i]
        state = torch.stack(done.model) if isinstance(done.model, tuple) else done.model
        prepared.stores[i].append(done.record, state)
        on_round(arm, seed, done.record)

    if prepared.simulation is not None:
        results = prepared.simulation.run(store_round)
        for place, result in enumerate(results):
            _finish(prepared.stores[prepared.live[place]], prepared.runs[prepared.live[place]][2], result)

    histories: dict[str, dict[int, History]] = {}
    diverged: dict[str, dict[int, str]] = {}
    for (arm, seed, _), store in zip(prepared.runs, prepared.stores, strict=True):
        histories.setdefault(arm, {})[seed] = store.history()
        message = store.diverged()
        if message is not None:
            diverged.setdefault(arm, {})[seed] = message
    summary = {
        "experiment": experiment.name,
        "rounds": experiment.rounds,
        "seeds": experiment.seeds,
        "device": _device_name(prepared.device),
        "seconds": round(earlier + time.monotonic() - began, 3),
        "arms": summarise(histories, diverged),
    }
    _write_atomically(folder / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return Outcome(summary, histories, diverged)


def free_folder(name: str, parent: Path = Path("runs")) -> Path:
    """Choose ``runs/NAME``, or ``runs/NAME-2`` and so on if that is taken."""
    candidate, number = parent / name, 1
    while candidate.exists():
        number += 1
        candidate = parent / f"{name}-{number}"
    return candidate


def latest_folder(name: str, parent: Path = Path("runs")) -> Path:
    """Find the newest folder that :func:`free_folder` gave for this name."""
    candidate, number = parent / name, 1
    while (following := parent / f"{name}-{number + 1}").exists():
        candidate, number = following, number + 1
    return candidate


def _check_same(experiment: Experiment, folder: Path, device: torch.device) -> list[str]:
    path = folder / "config.toml"
    if not path.exists():
        raise FedalignError(f"{folder} holds no run to resume (there is no config.toml in it)")
    try:
        stored = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise FedalignError(f"{path} is damaged, so this run cannot be resumed: {error}") from error
    old, new = _flatten(stored), _flatten(_settings(experiment, device))
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key != "device")
    if changed:
        shown = "; ".join(f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in changed)
        raise FedalignError(f"{folder} was run with other settings, so it cannot be resumed with these: {shown}")
    if old.get("device") != new.get("device"):
        return [f"the run began on {old.get('device')} and goes on on {new.get('device')}: the last bits may differ"]
    return []


def _common_points(stores: Sequence[RunStore]) -> tuple[list[Checkpoint | None], list[str]]:
    """Find where each run goes on. All go on from the same round if they can, as in an uninterrupted run."""
    usable, notes = [], []
    for store in stores:
        good, said = store.checkpoints()
        usable.append(good)
        if said:
            onward = f"going on from round {good[0].rounds}" if good else "starting this run again"
            notes += [f"{message}; {onward}" for message in said]
    counted = [
        good[0].rounds if good else 0 for good, store in zip(usable, stores, strict=True) if not store.diverged()
    ]
    common = min(counted, default=0)
    points: list[Checkpoint | None] = []
    for good in usable:
        same = [checkpoint for checkpoint in good if checkpoint.rounds == common]
        points.append(same[0] if same else good[0] if good else None)
    return points, notes


def _from(point: Checkpoint | None, spec: RunSpec) -> RunSpec:
    return spec if point is None else dataclasses.replace(spec, start=point.rounds, state=point.state)


def _open_folder(prepared: Prepared) -> None:
    try:
        prepared.folder.mkdir(parents=True, exist_ok=True)
        for store in prepared.stores:
            store.folder.mkdir(parents=True, exist_ok=True)
        if not prepared.resume:
            text = tomli_w.dumps(_settings(prepared.experiment, prepared.device))
            _write_atomically(prepared.folder / "config.toml", text)
    except OSError as error:
        raise FedalignError(f"cannot write to {prepared.folder}: {error.strerror}") from error
    if prepared.resume:
        for i in prepared.live:
            prepared.stores[i].rewind(prepared.points[i])


def _finish(store: RunStore, spec: RunSpec, result: SimulationResult) -> None:
    if result.error is not None:
        store.mark_diverged(result.error)
        return
    if isinstance(spec.rule, Alone):
        names = spec.federation.roster.names
        tensors = {
            f"{name}.{key}": value.contiguous()
            for name, module in zip(names, result.model, strict=True)
            for key, value in module.state_dict().items()
        }
    else:
        tensors = {key: value.contiguous() for key, value in result.model.state_dict().items()}
    store.save_model(tensors)


def _settings(experiment: Experiment, device: torch.device) -> dict[str, Any]:
    return {"device": device.type, **experiment.settings}


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _earlier_seconds(folder: Path) -> float:
    path = folder / "summary.json"
    return float(json.loads(path.read_text(encoding="utf-8"))["seconds"]) if path.exists() else 0.0


def _device_name(device: torch.device) -> str:
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def _write_atomically(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
