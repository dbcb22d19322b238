"""What a sweep found: every point's figures for every arm, and the best points."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedalign.data.federation import Federation
from fedalign.errors import FedalignError, nearest
from fedalign.experiments.arms import trains_alone
from fedalign.experiments.summary import over_seeds
from fedalign.experiments.sweep import Sweep
from fedalign.experiments.sweep_space import Point, shown
from fedalign.experiments.sweep_stacks import FIGURES, Figures


@dataclass(frozen=True)
class Row:
    """An arm at a point: its figures, each with ``mean``, ``std`` and ``per_seed``, and the seeds that diverged."""

    point: Point
    arm: str
    alone: bool  #: trains a model for each client, so there is no shared model to rank
    figures: Mapping[str, Mapping[str, Any]]
    diverged: Mapping[int, str]

    def mean(self, name: str) -> float | None:
        """Return the mean of a figure over seeds; None if there is none, or if a seed diverged."""
        value: float | None = self.figures[name]["mean"]
        return None if self.diverged else value


def rows_of(sweep: Sweep, done: Mapping[str, Figures]) -> list[Row]:
    """Gather the figures of every point and arm whose runs have all finished."""
    rows = []
    for point, runs in zip(sweep.points, sweep.runs, strict=True):
        for arm in dict.fromkeys(arm for arm, _ in runs):
            own = {seed: run for (one, seed), run in runs.items() if one == arm}
            if not all(run.id in done for run in own.values()):
                continue
            found = {seed: done[run.id] for seed, run in own.items()}
            figures = {
                name: over_seeds([None if one["diverged"] else one[name] for one in found.values()]) for name in FIGURES
            }
            settings = next(iter(own.values())).settings
            alone = trains_alone(settings, arm)
            diverged = {seed: str(one["diverged"]) for seed, one in found.items() if one["diverged"]}
            rows.append(Row(point, arm, alone, figures, diverged))
    return rows


def chosen_figure(asked: str | None, federation: Federation) -> str:
    """Return the figure that points are compared by: the one asked for, else test accuracy or what there is of it.

    Without test data it is measured on held-out data, or else on training data; without classes it is the loss.
    """
    if asked is not None:
        if asked not in FIGURES:
            raise FedalignError(f"--by is {asked!r}; {nearest(asked, FIGURES)}")
        return asked
    split = "test" if federation.has_test else "heldout" if federation.has_heldout else "global"
    return f"{split}_{'accuracy' if federation.pool.has_classes else 'loss'}"


def best(rows: Iterable[Row], by: str) -> Row | None:
    """Return the row with the highest accuracy, or the lowest loss; None if all diverged."""
    known = [row for row in rows if row.mean(by) is not None]
    return max(known, key=lambda row: goodness(row.mean(by), by), default=None)


def goodness(value: float | None, by: str) -> float:
    """Give a number that is larger for a better value."""
    if value is None:
        return float("-inf")
    return -value if by.endswith("loss") else value


def best_rows(rows: Sequence[Row], by: str) -> tuple[Row | None, dict[str, Row]]:
    """Return the best shared model of all points, and the best point of every arm."""
    by_arm = {arm: best([row for row in rows if row.arm == arm], by) for arm in dict.fromkeys(row.arm for row in rows)}
    return best([row for row in rows if not row.alone], by), {
        arm: row for arm, row in by_arm.items() if row is not None
    }


def as_json(sweep: Sweep, rows: Sequence[Row], by: str) -> dict[str, Any]:
    """Return what ``sweep.json`` holds."""
    winner, by_arm = best_rows(rows, by)
    return {
        "experiment": sweep.experiment.name,
        "rounds": sweep.experiment.rounds,
        "seeds": sweep.experiment.seeds,
        "keys": {axis.key: str(axis) for axis in sweep.axes},
        "by": by,
        "best": None if winner is None else {"arm": winner.arm, "point": _plain(winner.point), **winner.figures[by]},
        "best_by_arm": {arm: {"point": _plain(row.point), **row.figures[by]} for arm, row in by_arm.items()},
        "points": [
            {
                "point": _plain(point),
                "arms": {
                    row.arm: {**row.figures, "diverged": {str(s): m for s, m in row.diverged.items()}}
                    for row in rows
                    if row.point == point
                },
            }
            for point in sweep.points
        ],
    }


def as_csv(sweep: Sweep, rows: Sequence[Row], by: str) -> str:
    """Return what ``sweep.csv`` holds: a line for every point and arm; ``best`` marks the best point of each arm."""
    _, by_arm = best_rows(rows, by)
    keys = [axis.key for axis in sweep.axes]
    numbers = [f"{name}_{part}" for name in FIGURES for part in ("mean", "std")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*keys, "arm", *numbers, "diverged", "best"])
    for row in rows:
        figures = [row.figures[name][part] for name in FIGURES for part in ("mean", "std")]
        cells = ["" if value is None else f"{value:.6g}" for value in figures]
        marked = row is by_arm.get(row.arm)
        values = [shown(row.point[key]) for key in keys]
        writer.writerow([*values, row.arm, *cells, len(row.diverged), "yes" if marked else ""])
    return text.getvalue()


def _plain(value: Any) -> Any:
    """Give a value as JSON holds it: there is no infinity, which is written "inf"."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
