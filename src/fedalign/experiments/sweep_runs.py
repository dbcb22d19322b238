"""Runs a sweep into a folder; every finished run's figures are kept in ``results.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fedalign.errors import FedalignError
from fedalign.experiments.additions import without_additions
from fedalign.experiments.config_file import check_same, read_settings
from fedalign.experiments.store import write_atomically
from fedalign.experiments.sweep import Run, Sweep
from fedalign.experiments.sweep_stacks import Figures, OnRound, simulate_stack, stacks
from fedalign.experiments.sweep_workers import in_workers, usual_workers
from fedalign.simulation.device import resolve_device

# Most runs of a stack. An interruption loses the stacks under way, and a CPU gains little by more.
_MOST_RUNS = {"cuda": 120, "cpu": 24}


def open_folder(sweep: Sweep, folder: Path, resume: bool) -> tuple[dict[str, Figures], list[str]]:
    """Make the output folder, or read the runs that have finished there; also returns notes for the user.

    A resumed sweep may have further values, keys, arms and seeds. Raises :class:`FedalignError` if the folder cannot
    be used, or if its runs had other settings.
    """
    held = (folder / "config.toml").exists()
    if resume and not held:
        raise FedalignError(f"{folder} holds no sweep to resume (there is no config.toml in it)")
    if not resume and held:
        raise FedalignError(f"{folder} already holds output; continue it with --resume, or choose another --out")
    settings = {**sweep.settings(), "device": resolve_device(sweep.experiment.device).type}
    notes: list[str] = []
    done: dict[str, Figures] = {}
    if resume:
        before = read_settings(folder)
        if "sweep" not in before:
            raise FedalignError(f"{folder} holds no sweep but a run of {before.get('name')!r}; choose another --out")
        varied = {*before.pop("sweep"), *settings["sweep"]}
        now = {key: value for key, value in settings.items() if key != "sweep"}
        now |= {key: before[key] for key in ("arms", "seeds") if key in before}  # these may differ
        for key in varied:
            before, now = _without(before, key), _without(now, key)
        notes = check_same(folder, before, without_additions(before, now))
        done = _read(folder / "results.jsonl")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.toml", tomli_w.dumps(settings))
        write_atomically(folder / "results.jsonl", "".join(_line(*pair) for pair in done.items()))
    except OSError as error:
        raise FedalignError(f"cannot write to {folder}: {error.strerror}") from error
    return done, notes


def _without(settings: dict[str, Any], key: str) -> dict[str, Any]:
    first, dot, rest = key.partition(".")
    if not dot:
        return {name: value for name, value in settings.items() if name != first}
    section = settings.get(first)
    return {**settings, first: _without(section, rest)} if isinstance(section, dict) else settings


def left_to_do(sweep: Sweep, done: dict[str, Figures]) -> list[Run]:
    """List the runs of a sweep that have not finished."""
    return [run for run in sweep.all_runs() if run.id not in done]


def run_all(
    sweep: Sweep,
    folder: Path,
    done: dict[str, Figures],
    *,
    most: int | None = None,
    workers: int | None = None,
    on_round: OnRound = lambda run, record: None,
) -> None:
    """Simulate all runs that are not in ``done``, and add them to it and to ``results.jsonl``, stack by stack.

    ``most`` is the size of a stack; ``workers`` the number of processes, by default one for each core of a CPU.
    ``on_round`` hears of every round of every run.
    """
    left = left_to_do(sweep, done)
    if not left:
        return
    device = resolve_device(sweep.experiment.device)
    processes = usual_workers(left, device.type) if workers is None else workers
    divided = stacks(left, most or _MOST_RUNS.get(device.type, 24), processes)
    finished: Iterator[tuple[Sequence[Run], list[Figures]]]
    if processes > 1:
        finished = in_workers(divided, sweep.folder, str(device), processes, on_round)
    else:
        finished = ((stack, simulate_stack(stack, sweep.folder, str(device), on_round)) for stack in divided)
    for stack, figures in finished:
        found = {run.id: {"arm": run.arm, "seed": run.seed, **one} for run, one in zip(stack, figures, strict=True)}
        with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(_line(*pair) for pair in found.items())
        done |= found


def _line(run: str, figures: Figures) -> str:
    return json.dumps({"run": run, **figures}) + "\n"


def _read(path: Path) -> dict[str, Figures]:
    """Read the finished runs; a last line that a kill cut off is left out, and its run is done again."""
    found: dict[str, Figures] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row: dict[str, Any] = json.loads(line)
            found[row.pop("run")] = row
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines):
                break
            raise FedalignError(f"{path} is damaged in line {number}: {error}") from error
    return found
