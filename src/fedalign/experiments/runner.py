"""Runs an experiment into a folder: checked first, written as it happens, and resumable."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch

from fedalign.attacks.adversary import Adversary
from fedalign.attacks.hostile import hostile_clients
from fedalign.callbacks import Callback
from fedalign.errors import FedalignError
from fedalign.experiments.config import Experiment, load_settings
from fedalign.experiments.config_file import check_same, read_settings
from fedalign.experiments.recorder import Recorder
from fedalign.experiments.store import Checkpoint, RunStore, write_atomically
from fedalign.experiments.summary import incentive, summarise
from fedalign.protocol.records import History
from fedalign.rules.auto import AutoAlign
from fedalign.rules.baselines import Alone
from fedalign.rules.verified import Verified
from fedalign.simulation.device import resolve_device
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.model_checks import check_repeatable
from fedalign.simulation.ray_workers import RaySimulation
from fedalign.simulation.simulation import Simulation
from fedalign.simulation.spec import RunSpec, initial_module

_BYTES_A_ROUND = 64 << 20  # of checkpoints, on average
CallbackFactory = Callable[[str, int], Callback]  # makes the callback of an arm and a seed


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
    simulation: Simulation | RaySimulation | None
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


def prepare(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    device: str = "auto",
    on: Literal["here", "ray"] = "here",
    workers: int | None = None,
    callbacks: Sequence[CallbackFactory] = (),
) -> Prepared:
    """Check an experiment, its output folder and, to resume, its checkpoints. Writes nothing.

    With ``on="ray"`` the runs are spread over ``workers`` of Ray's cluster. ``callbacks`` are functions of an arm and
    a seed, each of which makes a callback for that run.
    """
    chosen = resolve_device(device if on == "here" else "cpu")
    notes: list[str] = []
    if resume:
        notes += _check_same(experiment, folder, chosen)
    elif folder.is_dir() and (folder / "config.toml").exists():
        held = read_settings(folder).get("name", "another experiment")
        raise FedalignError(
            f"{folder} already holds a run of {held!r}; continue it with --resume, or choose another --out"
        )
    elif folder.exists() and not folder.is_dir():
        raise FedalignError(f"{folder} is a file; --out must name a folder")
    runs = experiment.specs()
    stores = [RunStore(folder / arm / f"seed-{seed}") for arm, seed, _ in runs]
    if not resume:
        for store in stores:
            if not store.is_empty():
                raise FedalignError(f"{store.folder} already holds a run's output; choose another --out")
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
    simulation: Simulation | RaySimulation | None = None
    if live:
        recorders = _recorders(experiment, [runs[i][2] for i in live], [stores[i] for i in live])
        for i, recorder in zip(live, recorders, strict=True):
            arm, seed, spec = runs[i]
            more = [*experiment.make_trackers(), *(make(arm, seed) for make in callbacks)]
            everything = [*spec.callbacks, recorder, *more]
            runs[i] = arm, seed, dataclasses.replace(spec, callbacks=everything, folder=stores[i].folder)
        specs, loss, tf32 = [runs[i][2] for i in live], experiment.loss, experiment.tf32
        if on == "ray":
            simulation = RaySimulation(specs, experiment.model, loss=loss, device=device, tf32=tf32, workers=workers)
            chosen = simulation.device
        else:
            engine, chunk = experiment.settings["engine"], experiment.settings["chunk"] or None
            simulation = Simulation(
                specs, experiment.model, loss=loss, device=str(chosen), engine=engine, chunk=chunk, tf32=tf32
            )
    return Prepared(experiment, folder, resume, runs, stores, points, chosen, simulation, live, notes)


def execute(prepared: Prepared) -> Outcome:
    """Run what was prepared. Callbacks write the output and hear of every finished round of every run."""
    began = time.monotonic()
    experiment, folder = prepared.experiment, prepared.folder
    _open_folder(prepared)
    earlier = _earlier_seconds(folder) if prepared.resume else 0.0
    if prepared.simulation is not None:
        try:
            for _ in prepared.simulation.rounds():
                pass  # the callbacks have been told
        except Exception:
            if not _has_rounds(folder):  # nothing is lost, and the folder is free for another try
                (folder / "config.toml").unlink(missing_ok=True)
            raise
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
        "arms": summarise(histories, diverged, {arm for arm, _, spec in prepared.runs if isinstance(spec.rule, Alone)}),
    }
    if (classes := prepared.runs[0][2].federation.pool.classes) is not None:
        summary["classes"] = list(classes)
    if experiment.adversary is not None:
        summary["hostile"] = _hostile(experiment.adversary, prepared.runs)
    if experiment.settings["theory"]:
        from fedalign.theory.comparison import summarise as theory_of

        summary["theory"] = theory_of(experiment.settings, prepared.runs, histories, experiment.model)
    alone = next((arm for arm, _, spec in prepared.runs if isinstance(spec.rule, Alone)), None)
    if alone is not None:
        tests: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for (arm, seed, _), store in zip(prepared.runs, prepared.stores, strict=True):
            tests.setdefault(arm, {})[seed] = store.clients()
        summary["incentive"] = incentive(tests, alone)
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return Outcome(summary, histories, diverged)


def _hostile(adversary: Adversary, runs: Sequence[tuple[str, int, RunSpec]]) -> dict[str, list[str]]:
    """Name the hostile clients of every seed."""
    rosters = {seed: spec.federation.roster for _, seed, spec in runs}
    return {
        str(seed): [roster.names[k] for k in sorted(hostile_clients(adversary, roster, seed))]
        for seed, roster in rosters.items()
    }


def _has_rounds(folder: Path) -> bool:
    """Say whether some run in a folder has finished a round; else there is nothing to lose in it."""
    return any(path.stat().st_size for path in folder.glob("*/seed-*/rounds.jsonl"))


def _recorders(experiment: Experiment, specs: Sequence[RunSpec], stores: Sequence[RunStore]) -> list[Recorder]:
    """Make the callbacks that write runs; checkpoints are rarer where the models are very large."""
    module = initial_module(experiment.model, 0)
    check_repeatable(module)
    layout = Layout(module)
    size = layout.size * torch.empty(0, dtype=layout.dtype).element_size()
    every = max(1, -(-sum(_models_kept(spec) for spec in specs) * size // _BYTES_A_ROUND))
    return [Recorder(store, spec.federation, spec.rounds, every) for spec, store in zip(specs, stores, strict=True)]


def _models_kept(spec: RunSpec) -> int:
    """Count the models' worth of numbers in a run's checkpoint."""
    clients = len(spec.federation)
    if isinstance(spec.rule, Alone):
        return clients
    rule, moments = spec.rule, 3 if spec.server is not None else 1
    controls = clients + 1 if spec.local.scaffold else 0
    if isinstance(rule, Verified):  # the served model, the training model and the priority-only model
        return 1 + 2 * moments
    branches = 2 if isinstance(rule, AutoAlign) and rule.fallback else 1
    training = 1 if isinstance(rule, AutoAlign) and rule.has_training_model else 0
    return training + branches * moments + controls


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
    if not (folder / "config.toml").exists():
        raise FedalignError(f"{folder} holds no run to resume (there is no config.toml in it)")
    read_settings(folder)
    # Read as an experiment, settings that are newer than the run have their defaults.
    before, _ = load_settings(str(folder / "config.toml"), folder=experiment.folder)
    return check_same(folder, before, _settings(experiment, device))


def _common_points(stores: Sequence[RunStore]) -> tuple[list[Checkpoint | None], list[str]]:
    """Find where each run goes on. All go on from the same round if they can, as in an uninterrupted run."""
    usable, notes = [], []
    for store in stores:
        good, said = store.checkpoints()
        usable.append(good)
        if said:
            onward = f"going on from round {good[0].rounds}" if good else "this run starts again"
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
    return spec if point is None else dataclasses.replace(spec, snapshot=point.snapshot, last=point.last)


def _open_folder(prepared: Prepared) -> None:
    try:
        prepared.folder.mkdir(parents=True, exist_ok=True)
        for store in prepared.stores:
            store.folder.mkdir(parents=True, exist_ok=True)
        if not prepared.resume:
            text = tomli_w.dumps(_settings(prepared.experiment, prepared.device))
            write_atomically(prepared.folder / "config.toml", text)
    except OSError as error:
        raise FedalignError(f"cannot write to {prepared.folder}: {error.strerror}") from error
    if prepared.resume:
        for i in prepared.live:
            prepared.stores[i].rewind(prepared.points[i])


def _settings(experiment: Experiment, device: torch.device) -> dict[str, Any]:
    return {**experiment.settings, "device": device.type}


def _earlier_seconds(folder: Path) -> float:
    try:
        return float(json.loads((folder / "summary.json").read_bytes())["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0  # the run never finished, or its summary is damaged and is about to be written again


def _device_name(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type  # on Ray, the GPU may be another machine's
