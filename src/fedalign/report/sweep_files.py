"""The output of a sweep: ``sweep.json``, ``sweep.csv``, the picture, and the table for a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fedalign.errors import FedalignError
from fedalign.experiments.store import write_atomically
from fedalign.experiments.sweep import Sweep
from fedalign.experiments.sweep_space import label, shown
from fedalign.experiments.sweep_table import Row, as_csv, as_json, best_rows
from fedalign.report import plot_style
from fedalign.report.sweep_plots import picture, words
from fedalign.report.table import spread


def write_sweep(sweep: Sweep, rows: Sequence[Row], by: str, folder: Path) -> list[Path]:
    """Write the files of a sweep; returns their paths. Without any figure, there is no picture."""
    try:
        write_atomically(folder / "sweep.json", json.dumps(as_json(sweep, rows, by), indent=2, allow_nan=False) + "\n")
        write_atomically(folder / "sweep.csv", as_csv(sweep, rows, by))
        pictures = []
        if any(row.mean(by) is not None for row in rows):
            pictures = plot_style.save(picture(sweep.axes, rows, by, sweep.experiment.name), folder / "sweep")
    except OSError as error:
        raise FedalignError(f"cannot write the sweep to {folder}: {error.strerror}") from error
    return [folder / "sweep.csv", folder / "sweep.json", *pictures]


def terminal_table(sweep: Sweep, rows: Sequence[Row], by: str) -> Table:
    """Draw a row for each point and a column for each arm; ``*`` and bold mark the best point of an arm."""
    _, by_arm = best_rows(rows, by)
    seeds = len(sweep.experiment.seeds)
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    table = Table(
        title=f"{sweep.experiment.name}, {len(sweep.points)} points: {words(by)}",
        caption=f"Last 10 rounds, {over}. *: the best point of the arm.{_hint(by)}",
    )
    for axis in sweep.axes:
        table.add_column(axis.key, overflow="fold")
    arms = list(dict.fromkeys(row.arm for row in rows))
    for arm in arms:
        table.add_column(arm, justify="right", overflow="fold")
    scale, digits = (100, 1) if by.endswith("accuracy") else (1, 3)
    for point in sweep.points:
        own = {row.arm: row for row in rows if row.point == point}
        cells = []
        for arm in arms:
            row = own.get(arm)
            text = "–" if row is None else "diverged" if row.diverged else spread(row.figures[by], scale, digits)
            cells.append(f"[bold green]* {text}[/]" if row is not None and row is by_arm.get(arm) else text)
        table.add_row(*[escape(shown(point[axis.key])) for axis in sweep.axes], *cells)
    return table


def best_line(rows: Sequence[Row], by: str) -> str:
    """Say in a line which shared model is the best, and at which point."""
    winner, _ = best_rows(rows, by)
    if winner is None:
        return "no point has a result"
    scale, digits = (100, 1) if by.endswith("accuracy") else (1, 3)
    return f"best: {winner.arm}, {spread(winner.figures[by], scale, digits)} ({words(by)}), at {label(winner.point)}"


def _hint(by: str) -> str:
    if not by.startswith("test"):
        return ""
    return " A choice by test data flatters: --by global_loss chooses by held-out data."
