"""Live progress of a sweep: a bar over the rounds of all runs, and the best point so far."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedalign.cli.plain_lines import PlainLines
from fedalign.experiments.arms import trains_alone
from fedalign.experiments.sweep import Run, Sweep
from fedalign.experiments.sweep_space import label
from fedalign.experiments.sweep_stacks import FIGURES, Figures
from fedalign.experiments.sweep_table import goodness
from fedalign.protocol.records import RoundRecord


class SweepProgress:
    """Shows the finished rounds of all runs, and the point and arm with the best figure so far.

    On a terminal it is a bar; elsewhere it is a plain line every so often. ``done`` are the runs that have finished
    before. Figures of runs under way are those of the last round that was measured.
    """

    def __init__(
        self, console: Console, sweep: Sweep, left: Sequence[Run], done: Mapping[str, Figures], by: str
    ) -> None:
        self._by, self._sweep = by, sweep
        self._rounds = {run.id: int(run.settings["rounds"]) for run in left}
        self._total, self._completed = sum(self._rounds.values()), 0
        self._latest: dict[str, dict[str, float]] = {
            id: {name: one[name] for name in FIGURES if one.get(name) is not None} for id, one in done.items()
        }
        self._shown = 0.0
        self._plain = None if console.is_terminal else PlainLines()
        self._bar = Progress(
            TextColumn("{task.fields[best]}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=self._plain is not None,
        )
        self._task = self._bar.add_task("runs", total=self._total, best="")

    def __enter__(self) -> SweepProgress:
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.__exit__(None, None, None)

    def update(self, run: Run, record: RoundRecord) -> None:
        """Show that a run has finished a round."""
        self._completed += 1
        found = {name: value for name in FIGURES if (value := getattr(record, name)) is not None}
        self._latest.setdefault(run.id, {}).update(found)
        if self._plain is not None:
            part = 100 * self._completed // max(1, self._total)
            self._plain.show(self._completed, self._total, lambda: f"{part} % of all rounds, {self.best()}")
            return
        if time.monotonic() - self._shown > 0.5:  # to find the best takes a while where there are many points
            self._shown = time.monotonic()
            self._bar.update(self._task, best=escape(self.best()))
        self._bar.update(self._task, completed=self._completed)

    def best(self) -> str:
        """Name the best point so far among those that have figures of all seeds."""
        by = self._by
        found: tuple[float, str] | None = None
        for point, runs in zip(self._sweep.points, self._sweep.runs, strict=True):
            for arm in dict.fromkeys(arm for arm, _ in runs):
                own = [run for (one, _), run in runs.items() if one == arm]
                figures = [self._latest.get(run.id, {}).get(by) for run in own]
                known = [value for value in figures if value is not None]
                if len(known) < len(figures) or trains_alone(own[0].settings, arm):
                    continue
                mean = sum(known) / len(known)
                text = f"{100 * mean:.1f} %" if by.endswith("accuracy") else f"{mean:.3f}"
                if found is None or goodness(mean, by) > found[0]:
                    found = goodness(mean, by), f"best so far: {arm} {text} at {label(point)}"
        return "no figures yet" if found is None else found[1]
