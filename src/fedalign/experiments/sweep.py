"""A sweep: one experiment at many points of its settings. Runs that are the same at several points are done once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.experiments.arms import arm_table, rule_options
from fedalign.experiments.config import Experiment, load
from fedalign.experiments.sweep_space import Choice, Point, Range, label

# What names an experiment, or says how and not what to compute; the arm's own table and the seed are added.
_NOT_OF_A_RUN = ("name", "description", "device", "arms", "arm", "seeds", "trackers")
_OF_SOME_RULES = ("epsilon", "match")  # settings that only rules with such an option have


@dataclass(frozen=True)
class Run:
    """An arm and a seed at a point of a sweep, or at several: ``id`` is a hash of the settings that it depends on."""

    id: str
    arm: str
    seed: int
    settings: Mapping[str, Any] = field(hash=False, compare=False)  #: the checked settings of a point that has it


@dataclass
class Sweep:
    """The points of a sweep; :func:`plan_sweep` makes one without points."""

    name: str
    overrides: dict[str, Any]
    axes: Sequence[Choice | Range]
    experiment: Experiment  #: at the first value of every key
    points: list[Point] = field(default_factory=list)
    runs: list[dict[tuple[str, int], Run]] = field(default_factory=list)  #: of every point: by arm and seed

    def add(self, points: Sequence[Point]) -> None:
        """Check points and add those that are new; a :class:`FedalignError` names the point that is wrong."""
        for point in points:
            if point in self.points:
                continue
            try:
                experiment = load(self.name, {**self.overrides, **point})
            except FedalignError as error:
                raise FedalignError(f"at {label(point)}: {error}") from error
            self.points.append(point)
            self.runs.append(
                {(arm, seed): run_of(experiment, arm, seed) for arm in experiment.arms for seed in experiment.seeds}
            )

    @property
    def folder(self) -> Path | None:
        """Where users' own modules are."""
        return self.experiment.folder

    def all_runs(self) -> list[Run]:
        """List the runs of all points, each once."""
        return list({run.id: run for own in self.runs for run in own.values()}.values())

    def settings(self) -> dict[str, Any]:
        """Return what ``config.toml`` holds: the settings at the first values, and under ``sweep`` all values."""
        varied = {axis.key: str(axis) for axis in self.axes}
        return {**self.experiment.settings, "sweep": varied}


def plan_sweep(name: str, overrides: Mapping[str, Any], axes: Sequence[Choice | Range]) -> Sweep:
    """Check the settings that all points share; the points are added with :meth:`Sweep.add`.

    >>> sweep = plan_sweep("synth-low", {"seeds": 1, "arms": ["priority", "fedalign"]}, [])
    >>> sweep.add([{"epsilon": 0.1}, {"epsilon": 0.2}])
    >>> len(sweep.points), len(sweep.all_runs())  # the arm priority does not depend on epsilon
    (2, 3)
    """
    first = {axis.key: axis.first for axis in axes}  # the file may leave a key to the sweep
    return Sweep(name, dict(overrides), axes, load(name, {**overrides, **first}))


def run_of(experiment: Experiment, arm: str, seed: int) -> Run:
    """Identify the run of an arm and a seed by the settings that it depends on."""
    settings = experiment.settings
    table = arm_table(settings, arm)
    known = rule_options(table["rule"], experiment.folder)
    own = {key: value for key, value in settings.items() if key not in _NOT_OF_A_RUN}
    if not settings["theory"]:  # the theorems' figures look at all settings
        for key in _OF_SOME_RULES:
            if key not in known or key in table:
                own.pop(key)
    text = json.dumps({"settings": own, "arm": table, "seed": seed}, sort_keys=True, default=str)
    return Run(hashlib.sha256(text.encode()).hexdigest()[:16], arm, seed, settings)
