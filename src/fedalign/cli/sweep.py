"""``fedalign sweep``: an experiment at many points of its settings, simulated together."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from fedalign.cli.notices import error_console, printed_notes
from fedalign.cli.options import DIVERGED, INTERRUPTED, add_seeds, count
from fedalign.errors import FedalignError, FederationWarning

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands
    from fedalign.experiments.sweep import Sweep
    from fedalign.experiments.sweep_stacks import Figures
    from fedalign.experiments.sweep_table import Row


def add(commands: Subcommands) -> None:
    """Add ``sweep`` to the subcommands of ``fedalign``."""
    command = commands.add_parser("sweep", help="run an experiment at many points of its settings, together")
    command.add_argument("experiment", metavar="NAME|FILE.toml", help="the name of an experiment, or your own file")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=A,B,C",
        help="values to try, all combinations of them; or one value for all; with --optuna also KEY=LOW..HIGH[:log]",
    )
    command.add_argument("--optuna", type=int, metavar="N", help="let Optuna choose N points")
    command.add_argument("--by", metavar="FIGURE", help="test_accuracy, test_loss, global_accuracy or global_loss")
    command.add_argument("--for", dest="arm", metavar="ARM", help="with --optuna: the arm to tune (default: the best)")
    command.add_argument("--arms", metavar="A,B", help="the arms to compare")
    add_seeds(command)
    command.add_argument("--rounds", type=int, metavar="N", help="number of communication rounds")
    command.add_argument("--device", metavar="auto|cpu|cuda", help="the device to train on (default: auto)")
    command.add_argument("--out", type=Path, metavar="DIR", help="the output folder (default: runs/sweep-NAME)")
    command.add_argument("--workers", type=int, metavar="N", help="processes on a CPU (default: one for each core)")
    command.add_argument(
        "--stack", type=int, metavar="N", help="how many runs are simulated together (default: up to 24, on a GPU 120)"
    )
    command.add_argument("--resume", action="store_true", help="continue; runs that have finished are not done again")
    command.add_argument("--quiet", action="store_true", help="show no progress and no tables, only the output folder")
    command.set_defaults(command=_sweep, tf32=None)


def _sweep(options: argparse.Namespace) -> int:
    from fedalign.experiments.output_folder import locked_folder
    from fedalign.experiments.sweep import plan_sweep
    from fedalign.experiments.sweep_optuna import check_search
    from fedalign.experiments.sweep_space import grid, read_axes
    from fedalign.experiments.sweep_table import chosen_figure

    for name in ("stack", "workers"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise FedalignError(f"--{name} must be at least 1, not {getattr(options, name)}")
    fixed, axes = read_axes(options.set)
    for name in ("seeds", "rounds", "device"):
        if getattr(options, name) is not None:
            if any(axis.key == name for axis in axes):
                raise FedalignError(f"{name} is given by --{name} and varied by --set; leave one of them out")
            fixed[name] = getattr(options, name)
    if options.arms is not None:
        fixed["arms"] = [arm.strip() for arm in options.arms.split(",") if arm.strip()]
    if options.optuna is not None:
        check_search(axes, options.optuna)
    with printed_notes():
        sweep = plan_sweep(options.experiment, fixed, axes)
        if options.arm is not None and options.arm not in sweep.experiment.arms:
            raise FedalignError(f"--for is {options.arm!r}, which is none of the arms {sweep.experiment.arms}")
        if options.optuna is None:
            sweep.add(grid(axes))
        # Missing data is reported now.
        options.by = chosen_figure(options.by, sweep.experiment.federation(sweep.experiment.seeds[0]))
    with locked_folder(options.out, f"sweep-{sweep.experiment.name}", options.resume) as lock:
        return _run_into(lock.folder, sweep, options)


def _run_into(folder: Path, sweep: Sweep, options: argparse.Namespace) -> int:
    """Run a sweep into a folder that is locked, and write its files."""
    from fedalign.experiments.sweep_runs import open_folder
    from fedalign.experiments.sweep_table import rows_of
    from fedalign.report.sweep_files import best_line, terminal_table, write_sweep

    console = Console(quiet=options.quiet, highlight=False)
    with printed_notes() as notes:
        done, said = open_folder(sweep, folder, options.resume)
        notes += said
    try:
        (_grid if options.optuna is None else _optuna)(sweep, folder, done, console, options)
    except KeyboardInterrupt:
        if rows := rows_of(sweep, done):
            write_sweep(sweep, rows, options.by, folder)
        error_console().print("[bold yellow]fedalign:[/] interrupted; finished runs are kept; add --resume to continue")
        return INTERRUPTED
    rows, by = rows_of(sweep, done), options.by
    written = write_sweep(sweep, rows, by, folder)
    console.print(terminal_table(sweep, rows, by))
    console.print(escape(best_line(rows, by)), soft_wrap=True)
    for path in written:
        console.print(f"  {escape(str(path))}", soft_wrap=True)
    if options.quiet:
        sys.stdout.write(f"{folder}\n")
    return DIVERGED if _say_diverged(rows) else 0


def _say_diverged(rows: list[Row]) -> bool:
    from fedalign.experiments.sweep_space import label

    for row in rows:
        for seed, message in row.diverged.items():
            where = escape(f"{label(row.point)}, {row.arm}, seed {seed}:")
            error_console().print(f"[bold red]{where}[/] {escape(message)}")
    return any(row.diverged for row in rows)


def _grid(sweep: Sweep, folder: Path, done: dict[str, Figures], console: Console, options: argparse.Namespace) -> None:
    """Run all points of a grid."""
    from fedalign.experiments.sweep_runs import left_to_do

    runs, left = sweep.all_runs(), left_to_do(sweep, done)
    cases = sum(len(own) for own in sweep.runs)
    same = f" ({cases - len(runs):,} more are the same at several points)" if cases > len(runs) else ""
    console.print(f"{_announced(sweep, len(sweep.points), folder)}: {count(len(runs), 'run')}{same}", soft_wrap=True)
    if options.resume:
        console.print(f"{len(runs) - len(left):,} runs have finished, {len(left):,} are left")
    _run_points(sweep, folder, done, console, options)


def _optuna(
    sweep: Sweep, folder: Path, done: dict[str, Figures], console: Console, options: argparse.Namespace
) -> None:
    """Run the points that Optuna proposes, batch by batch."""
    from fedalign.experiments.sweep_optuna import search
    from fedalign.experiments.sweep_table import best, rows_of

    console.print(f"{_announced(sweep, options.optuna, folder)}, chosen by Optuna", soft_wrap=True)

    def evaluate(points: list[dict[str, Any]]) -> list[float | None]:
        sweep.add(points)
        _run_points(sweep, folder, done, console, options)
        rows = [row for row in rows_of(sweep, done) if (row.arm == options.arm if options.arm else not row.alone)]
        winners = [best([row for row in rows if row.point == point], options.by) for point in points]
        return [None if winner is None else winner.mean(options.by) for winner in winners]

    search(sweep.axes, options.optuna, options.by.endswith("accuracy"), evaluate)


def _announced(sweep: Sweep, points: int, folder: Path) -> str:
    experiment = sweep.experiment
    return (
        f"[bold]sweep-{escape(experiment.name)}[/]: {count(points, 'point')} × {count(len(experiment.arms), 'arm')} × "
        f"{count(len(experiment.seeds), 'seed')}, {count(experiment.rounds, 'round')}; output in {escape(str(folder))}"
    )


def _run_points(
    sweep: Sweep, folder: Path, done: dict[str, Figures], console: Console, options: argparse.Namespace
) -> None:
    from fedalign.cli.sweep_progress import SweepProgress
    from fedalign.experiments.sweep_runs import left_to_do, run_all

    left = left_to_do(sweep, done)
    progress = None if options.quiet else SweepProgress(console, sweep, left, done, options.by)
    on_round: Callable[..., None] = (lambda run, record: None) if progress is None else progress.update
    with progress or contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FederationWarning)  # they have been said of the first point
        run_all(sweep, folder, done, most=options.stack, workers=options.workers, on_round=on_round)
