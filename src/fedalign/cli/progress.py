"""Live progress of an experiment: a bar for the rounds, and a line for each arm; plain lines without a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedalign.callbacks import Callback, Stopped
from fedalign.cli.plain_lines import PlainLines
from fedalign.errors import DivergedError
from fedalign.protocol.records import RoundRecord, mean_or_none


class ExperimentProgress:
    """Shows the finished rounds, the time left and, for each arm, the means of its last round over seeds."""

    def __init__(self, console: Console, arms: Sequence[str], rounds: int) -> None:
        self._bar = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("rounds", total=rounds)
        self._latest: dict[str, dict[int, RoundRecord]] = {arm: {} for arm in arms}
        self._ended: set[tuple[str, int]] = set()
        self._rounds, self._first = rounds, 0
        self._plain = None if console.is_terminal or console.is_jupyter else PlainLines()
        self._live = Live(self._picture(), console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> ExperimentProgress:
        if self._plain is None:
            self._live.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._plain is None:
            self._live.__exit__(None, None, None)

    def callback(self, arm: str, seed: int) -> Callback:
        """Make the callback that shows the rounds of one run."""
        return _ShowRound(self, arm, seed)

    def start_at(self, round: int) -> None:
        """Show that a resumed run goes on from this round."""
        self._first = round
        self._bar.update(self._task, completed=round)

    def update(self, arm: str, seed: int, record: RoundRecord) -> None:
        """Show the record of a round that has finished."""
        self._latest[arm][seed] = record
        self._show_slowest()

    def end(self, arm: str, seed: int) -> None:
        """Wait no longer for a run that has ended early."""
        self._ended.add((arm, seed))
        self._show_slowest()

    def _show_slowest(self) -> None:
        going = [r.round for arm, of in self._latest.items() for s, r in of.items() if (arm, s) not in self._ended]
        if not going:
            return
        finished = min(going) + 1
        if self._plain is not None:
            self._plain.show(finished, self._rounds, lambda: self._line(finished), self._first)
        else:
            self._bar.update(self._task, completed=finished)
            self._live.update(self._picture())

    def _line(self, finished: int) -> str:
        _, means = self._accuracies()
        shown = ", ".join(f"{arm} {100 * mean:.1f} %" for arm, mean in means.items() if mean is not None)
        return f"round {finished} of {self._rounds}" + (f": {shown}" if shown else "")

    def _accuracies(self) -> tuple[str, dict[str, float | None]]:
        """Say what accuracy the runs have, on test or on held-out data, and give every arm's."""
        records = [r for of_arm in self._latest.values() for r in of_arm.values()]
        split, words = ("heldout", "held-out") if any(r.heldout_loss is not None for r in records) else ("test", "test")
        means = {
            arm: mean_or_none(getattr(r, f"{split}_accuracy") for r in of_arm.values())
            for arm, of_arm in self._latest.items()
        }
        return f"{words} accuracy", means

    def _picture(self) -> Group:
        table = Table(box=None, padding=(0, 2))
        words, accuracies = self._accuracies()
        for heading in ("arm", words, "F(w)", "admitted"):
            table.add_column(heading, justify="left" if heading == "arm" else "right")
        for arm, of_arm in self._latest.items():
            accuracy = accuracies[arm]
            loss = mean_or_none(r.global_loss for r in of_arm.values())
            admitted = mean_or_none(float(r.admitted) for r in of_arm.values())
            table.add_row(
                arm,
                "–" if accuracy is None else f"{100 * accuracy:.1f} %",
                "–" if loss is None else f"{loss:.3f}",
                "–" if admitted is None else f"{admitted:.1f}",
            )
        return Group(self._bar, table)


class _ShowRound(Callback):
    needs_model = False

    def __init__(self, progress: ExperimentProgress, arm: str, seed: int) -> None:
        self._progress, self._arm, self._seed = progress, arm, seed

    def on_round(self, record: RoundRecord, model: object) -> None:
        self._progress.update(self._arm, self._seed, record)

    def on_stop(self, stopped: Stopped) -> None:
        self._progress.end(self._arm, self._seed)

    def on_error(self, error: DivergedError) -> None:
        self._progress.end(self._arm, self._seed)
