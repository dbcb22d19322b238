"""``fedalign run``: run an experiment, show its progress, and write its report."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from fedalign.cli.notices import error_console, notes_at_once, printed_notes
from fedalign.cli.options import DIVERGED, add_run_options, count, overrides_of
from fedalign.errors import FedalignError

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands
    from fedalign.experiments.config import Experiment
    from fedalign.experiments.runner import Outcome


def add(commands: Subcommands) -> None:
    """Add ``run`` to the subcommands of ``fedalign``."""
    command = commands.add_parser("run", help="run an experiment")
    command.add_argument(
        "experiment", metavar="NAME|FILE.toml", help="the name of an experiment (see fedalign list), or your own file"
    )
    command.add_argument("--arms", metavar="A,B", help="the arms to compare")
    add_run_options(command)
    command.add_argument("--out", type=Path, metavar="DIR", help="the output folder (default: runs/NAME)")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting, as in --set local.lr=0.05; repeatable",
    )
    command.add_argument("--resume", action="store_true", help="continue an interrupted run, or add arms and seeds")
    command.add_argument(
        "--continue-stopped", action="store_true", help="with --resume: continue also runs that stopped early"
    )
    command.add_argument(
        "--track",
        action="append",
        metavar="NAME",
        help="write the runs for a tracker: tensorboard, mlflow, wandb or your own module:Name; repeatable",
    )
    command.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    from fedalign.experiments.config import load
    from fedalign.experiments.output_folder import locked_folder

    if options.workers is not None and options.on != "ray":
        raise FedalignError("--workers needs --on ray")
    if options.continue_stopped and not options.resume:
        raise FedalignError("--continue-stopped needs --resume")
    overrides = overrides_of(options)
    experiment = load(options.experiment, overrides)
    with locked_folder(options.out, experiment.name, options.resume) as lock:
        if options.resume:
            experiment = _continued(experiment, lock.folder, options.experiment, overrides)
        return _run_into(lock.folder, experiment, options)


def _continued(experiment: Experiment, folder: Path, name: str, overrides: dict[str, Any]) -> Experiment:
    """Add the arms and seeds that are asked for to those of the folder; without any, continue with the folder's."""
    from fedalign.experiments.additions import with_additions
    from fedalign.experiments.config import load

    continued = load(name, with_additions(folder, overrides))
    left_out = [arm for arm in experiment.arms if arm not in continued.arms]
    if left_out:
        error_console().print(
            f"[yellow]note:[/] {escape(str(folder))} has no {escape(', '.join(left_out))}; "
            f"to add what is missing, name it: --arms {escape(','.join(left_out))}"
        )
    return continued


def _run_into(folder: Path, experiment: Experiment, options: argparse.Namespace) -> int:
    """Run an experiment into a folder that is locked, and write its report."""
    from fedalign.report.page import write_report
    from fedalign.report.read_runs import read_run
    from fedalign.report.terminal import tables

    console = Console(quiet=options.quiet, highlight=False)
    outcome = simulate(experiment, folder, console, options, resume=options.resume)
    console.print(*tables(outcome.summary), sep="\n")
    report = write_report([read_run(folder)], folder)
    for path in [folder / "summary.json", report.page, *[p for p in report.pictures if p.suffix == ".png"]]:
        console.print(f"  {escape(str(path))}", soft_wrap=True)
    if options.quiet:
        sys.stdout.write(f"{folder}\n")
    return DIVERGED if outcome.diverged else 0


def simulate(
    experiment: Experiment, folder: Path, console: Console, options: argparse.Namespace, *, resume: bool
) -> Outcome:
    """Check an experiment, announce it, run it with progress, and report the runs that diverged.

    ``options`` are those of :func:`add_run_options`; the output goes to ``folder``.
    """
    from fedalign.cli.progress import ExperimentProgress
    from fedalign.experiments.runner import execute, prepare

    progress = None if options.quiet else ExperimentProgress(console, experiment.arms, experiment.rounds)
    with printed_notes() as notes:
        prepared = prepare(
            experiment,
            folder,
            resume=resume,
            device=experiment.device,
            on=options.on,
            workers=options.workers,
            callbacks=[] if progress is None else [progress.callback],
            continue_stopped=getattr(options, "continue_stopped", False),
        )
        notes += prepared.notes
    console.print(
        f"[bold]{escape(experiment.name)}[/]: {count(len(experiment.arms), 'arm')} × "
        f"{count(len(experiment.seeds), 'seed')}, {count(experiment.rounds, 'round')}, "
        f"on {prepared.device}; output in {escape(str(folder))}"
    )
    if resume:
        console.print(
            f"continuing from round {prepared.start} of {experiment.rounds}; "
            f"{len(prepared.live)} of {len(prepared.runs)} runs are unfinished"
        )
    if progress is not None:
        progress.start_at(prepared.start)
    with notes_at_once(), progress or contextlib.nullcontext():
        outcome = execute(prepared)
    for arm, early in outcome.stopped.items():
        for seed, message in early.items():
            console.print(f"{escape(arm)}, seed {seed}: {escape(message)}")
    for arm, failed in outcome.diverged.items():
        for seed, message in failed.items():
            error_console().print(f"[bold red]{escape(arm)}, seed {seed}:[/] {escape(message)}")
    return outcome
