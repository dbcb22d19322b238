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
from fedalign.experiments.config import Experiment
from fedalign.experiments.config_file import read_settings
from fedalign.experiments.folder_lock import FolderLock
from fedalign.experiments.personal_summary import personal_summary, with_own
from fedalign.experiments.recorders import make_recorders
from fedalign.experiments.resume import check_settings, common_points, earlier_seconds, has_grown, rest_of
from fedalign.experiments.store import Checkpoint, RunStore, write_atomically
from fedalign.experiments.summary import incentive, summarise
from fedalign.ledger.writer import LedgerWriter
from fedalign.protocol.records import History
from fedalign.rules.baselines import Alone
from fedalign.simulation.device import resolve_device
from fedalign.simulation.ray_workers import RaySimulation
from fedalign.simulation.simulation import Simulation
from fedalign.simulation.spec import RunSpec

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
    lock: FolderLock  # held until :func:`execute` has ended
    notes: list[str] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The round that the live runs go on from."""
        return min((self.runs[i][2].start for i in self.live), default=self.experiment.rounds)


@dataclass(frozen=True)
class Outcome:
    """How it ended: ``summary`` as in ``summary.json``, every run's history, messages of diverged and stopped runs."""

    summary: dict[str, Any]
    histories: dict[str, dict[int, History]]
    diverged: dict[str, dict[int, str]]
    stopped: dict[str, dict[int, str]] = field(default_factory=dict)


def prepare(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    device: str = "auto",
    on: Literal["here", "ray"] = "here",
    workers: int | None = None,
    callbacks: Sequence[CallbackFactory] = (),
    continue_stopped: bool = False,
) -> Prepared:
    """Check an experiment, its output folder and, to resume, its checkpoints. Writes nothing but the folder's lock.

    The folder stays locked until :func:`execute` has ended, or until the lock is released. A resume leaves runs that
    stopped early as they are, unless ``continue_stopped`` asks for more rounds of them. With ``on="ray"`` the runs are
    spread over ``workers`` of Ray's cluster. ``callbacks`` are functions of an arm and a seed, each of which makes a
    callback for that run.
    """
    lock = FolderLock(folder)
    lock.acquire()
    try:
        return _prepare(lock, experiment, resume, device, on, workers, callbacks, continue_stopped)
    except BaseException:
        lock.release()
        raise


def _prepare(
    lock: FolderLock,
    experiment: Experiment,
    resume: bool,
    device: str,
    on: Literal["here", "ray"],
    workers: int | None,
    callbacks: Sequence[CallbackFactory],
    continue_stopped: bool,
) -> Prepared:
    folder = lock.folder
    chosen = resolve_device(device if on == "here" else "cpu")
    notes: list[str] = []
    if resume:
        notes += check_settings(experiment, folder, _settings(experiment, chosen))
    elif folder.is_dir() and (folder / "config.toml").exists():
        held = read_settings(folder).get("name", "another experiment")
        raise FedalignError(
            f"{folder} already holds a run of {held!r}; continue it with --resume (resume=True in Python), "
            "or choose another folder"
        )
    runs = experiment.specs()
    stores = [RunStore(folder / arm / f"seed-{seed}") for arm, seed, _ in runs]
    if not resume:
        for store in stores:
            if not store.is_empty():
                raise FedalignError(f"{store.folder} already holds a run's output; choose another --out")
    points: list[Checkpoint | None] = [None] * len(runs)
    if resume:
        points, said = common_points(stores, continue_stopped=continue_stopped)
        notes += said
    runs = [
        (arm, seed, rest_of(point, spec, store, continue_stopped=continue_stopped))
        for (arm, seed, spec), point, store in zip(runs, points, stores, strict=True)
    ]
    live = [
        i
        for i, ((_, _, spec), store) in enumerate(zip(runs, stores, strict=True))
        if store.diverged() is None
        and ((spec.start < spec.rounds and spec.stopped is None) or not store.model.exists())
    ]
    if still := sum(store.stopped() is not None for i, store in enumerate(stores) if i not in live):
        notes.append(f"{still} of {len(runs)} runs stopped early and stay so; --continue-stopped continues them")
    simulation: Simulation | RaySimulation | None = None
    if live:
        recorders = make_recorders(experiment, [runs[i][2] for i in live], [stores[i] for i in live])
        for i, recorder in zip(live, recorders, strict=True):
            arm, seed, spec = runs[i]
            own = [*spec.callbacks, *experiment.make_callbacks()]
            if spec.ledger is not None and not isinstance(spec.rule, Alone):
                own.append(LedgerWriter(spec.ledger))  # before the recorder, whose checkpoint needs the ledger's line
            more = [*experiment.make_trackers(), *(make(arm, seed) for make in callbacks)]
            runs[i] = (
                arm,
                seed,
                dataclasses.replace(spec, callbacks=[*own, recorder, *more], folder=stores[i].folder, home=folder),
            )
        specs, options = [runs[i][2] for i in live], experiment.engine_options()
        if on == "ray":
            simulation = RaySimulation(specs, experiment.model, device=device, workers=workers, **options)
            chosen = simulation.device
        else:
            simulation = Simulation(specs, experiment.model, device=str(chosen), **options)
    return Prepared(experiment, folder, resume, runs, stores, points, chosen, simulation, live, lock, notes)


def execute(prepared: Prepared) -> Outcome:
    """Run what was prepared. Callbacks write the output and hear of every finished round of every run."""
    with prepared.lock:
        return _execute(prepared)


def _execute(prepared: Prepared) -> Outcome:
    began = time.monotonic()
    experiment, folder = prepared.experiment, prepared.folder
    _open_folder(prepared)
    earlier = earlier_seconds(folder) if prepared.resume else 0.0
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
    stopped: dict[str, dict[int, str]] = {}
    for (arm, seed, _), store in zip(prepared.runs, prepared.stores, strict=True):
        histories.setdefault(arm, {})[seed] = store.history()
        message = store.diverged()
        if message is not None:
            diverged.setdefault(arm, {})[seed] = message
        if (early := store.stopped()) is not None:
            stopped.setdefault(arm, {})[seed] = str(early)
    alone = {arm for arm, _, spec in prepared.runs if isinstance(spec.rule, Alone)}
    summary = {
        "experiment": experiment.name,
        "rounds": experiment.rounds,
        "seeds": experiment.seeds,
        "device": _device_name(prepared.device),
        "seconds": round(earlier + time.monotonic() - began, 3),
        "arms": summarise(histories, diverged, alone, stopped),
    }
    if (classes := prepared.runs[0][2].federation.pool.classes) is not None:
        summary["classes"] = list(classes)
    if experiment.adversary is not None:
        summary["hostile"] = _hostile(experiment.adversary, prepared.runs)
    if experiment.settings["theory"]:
        from fedalign.theory.comparison import summarise as theory_of

        summary["theory"] = theory_of(experiment.settings, prepared.runs, histories, experiment.model)
    summary |= _gains(prepared, next((arm for arm in experiment.arms if arm in alone), None))
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return Outcome(summary, histories, diverged, stopped)


def _gains(prepared: Prepared, alone: str | None) -> dict[str, Any]:
    """Compare what clients have with what they would have without the federation, as the arm ``alone`` says."""
    tests: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for (arm, seed, _), store in zip(prepared.runs, prepared.stores, strict=True):
        tests.setdefault(arm, {})[seed] = store.clients()
    found: dict[str, Any] = {} if alone is None else {"incentive": incentive(tests, alone)}
    if not (personal := personal_summary(tests, alone)):
        return found
    for (arm, seed, _), store in zip(prepared.runs, prepared.stores, strict=True):
        if alone is not None and arm in personal and tests[arm][seed]:
            store.save_clients(with_own(tests[arm][seed], tests[alone].get(seed, [])))
    return {**found, "personal": personal}


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


def _open_folder(prepared: Prepared) -> None:
    try:
        prepared.folder.mkdir(parents=True, exist_ok=True)
        for store in prepared.stores:
            store.folder.mkdir(parents=True, exist_ok=True)
        if not prepared.resume or has_grown(prepared.folder, prepared.experiment.settings):
            text = tomli_w.dumps(_settings(prepared.experiment, prepared.device))
            write_atomically(prepared.folder / "config.toml", text)
    except OSError as error:
        raise FedalignError(f"cannot write to {prepared.folder}: {error.strerror}") from error
    if prepared.resume:
        for i in prepared.live:
            prepared.stores[i].rewind(prepared.points[i])
            if prepared.runs[i][2].stopped is None:
                prepared.stores[i].mark_stopped(None)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type  # on Ray, the GPU may be another machine's


def _settings(experiment: Experiment, device: torch.device) -> dict[str, Any]:
    return {**experiment.settings, "device": device.type}
