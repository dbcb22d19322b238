"""Simulates the runs of a sweep in stacks: runs of one model and loss, whatever else differs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fedalign.callbacks import Callback
from fedalign.data.federation import Federation
from fedalign.experiments.experiment import Experiment
from fedalign.experiments.sweep import Run
from fedalign.protocol.records import RoundRecord
from fedalign.simulation.api import simulate_many
from fedalign.simulation.simulation import SimulationResult
from fedalign.simulation.spec import RunSpec

#: what is kept of a run: means of the last 10 rounds
FIGURES = ("test_accuracy", "test_loss", "heldout_accuracy", "heldout_loss", "global_accuracy", "global_loss")
MEASURE_EVERY = 10  # rounds between test figures, which only show how it goes; the last ten rounds all have them

Figures = dict[str, Any]  # by the names above, and "diverged", the message or None
OnRound = Callable[[Run, RoundRecord], None]


def stacks(runs: Iterable[Run], most: int, parts: int = 1) -> list[list[Run]]:
    """Divide runs into stacks of at most ``most``, all of about one size; their number is a multiple of ``parts``.

    Runs are dealt out in turn, so that no stack gets all the expensive arms.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        alike = {key: run.settings[key] for key in ("model", "start", "loss", "tf32", "engine", "chunk")}
        groups.setdefault(json.dumps(alike, sort_keys=True, default=str), []).append(run)
    found: list[list[Run]] = []
    for group in groups.values():
        count = -(-len(group) // most)
        count = min(len(group), -(-count // parts) * parts)
        found += [group[first::count] for first in range(count)]
    return found


def simulate_stack(
    runs: Sequence[Run], folder: Path | None, device: str, on_round: OnRound = lambda run, record: None
) -> list[Figures]:
    """Simulate runs together; points with the same data share it. ``folder`` is where users' own modules are."""
    experiments: dict[int, Experiment] = {}
    federations: dict[tuple[str, int], Federation] = {}
    specs = []
    for run in runs:
        if id(run.settings) not in experiments:
            experiments[id(run.settings)] = Experiment(dict(run.settings), folder)
        experiment = experiments[id(run.settings)]
        key = (json.dumps(run.settings["data"], sort_keys=True, default=str), run.seed)
        if key not in federations:
            federations[key] = experiment.federation(run.seed)
        spec = experiment.spec(run.arm, run.seed, federations[key])
        specs.append(_for_sweep(spec, experiment.make_callbacks()))
    first = next(iter(experiments.values()))
    results = simulate_many(
        specs,
        first.model,
        device=device,
        **first.engine_options(),
        on_round=lambda index, done: on_round(runs[index], done.record),
    )
    return [_figures(result) for result in results]


def _for_sweep(spec: RunSpec, callbacks: list[Callback]) -> RunSpec:
    """Measure no more than a sweep keeps; where callbacks watch a run, as early stopping does, measure all they see."""
    if callbacks:
        return dataclasses.replace(spec, callbacks=callbacks)
    return dataclasses.replace(spec, callbacks=[], metrics={}, measure_every=MEASURE_EVERY)


def _figures(result: SimulationResult) -> Figures:
    means = {name: result.history.final(name) for name in FIGURES}
    found: Figures = {
        name: value if value is not None and math.isfinite(value) else None for name, value in means.items()
    }
    return {**found, "diverged": None if result.error is None else str(result.error)}
