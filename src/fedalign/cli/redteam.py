"""``fedalign redteam``: rules against attacks on one experiment, with a heat map and a page at the end."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedalign.cli.notices import error_console, printed_notes
from fedalign.cli.options import INTERRUPTED, add_seeds, count, setting
from fedalign.cli.plain_lines import PlainLines
from fedalign.errors import FedalignError

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands
    from fedalign.experiments.redteam import Case, RedTeam


def add(commands: Subcommands) -> None:
    """Add ``redteam`` to the subcommands of ``fedalign``."""
    command = commands.add_parser("redteam", help="test rules against hostile free clients")
    command.add_argument("experiment", metavar="NAME|FILE.toml", help="the experiment to attack, such as trust-synth")
    command.add_argument("--rules", metavar="A,B", help="rules, also with an aggregator: all+median")
    command.add_argument("--attacks", metavar="A,B", help="attacks (default: all of the catalogue)")
    command.add_argument("--fractions", metavar="P,Q", help="hostile parts of the free clients (0.25,0.5,0.75)")
    add_seeds(command)
    command.add_argument("--rounds", type=int, metavar="N", help="number of communication rounds")
    command.add_argument("--device", metavar="auto|cpu|cuda", help="the device to train on (default: auto)")
    command.add_argument("--out", type=Path, metavar="DIR", help="the output folder (default: runs/redteam-NAME)")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; repeatable")
    command.add_argument(
        "--stack", type=int, metavar="N", help="how many runs are simulated together (default: up to 30, on a GPU 120)"
    )
    command.add_argument("--resume", action="store_true", help="continue; runs that have finished are not done again")
    command.add_argument("--quiet", action="store_true", help="show no progress and no tables, only the output folder")
    command.set_defaults(command=_redteam)


def _redteam(options: argparse.Namespace) -> int:
    from fedalign.experiments.output_folder import locked_folder

    if options.stack is not None and options.stack < 1:
        raise FedalignError(f"--stack must be at least 1, not {options.stack}")
    with printed_notes():
        team = _team(options)
    with locked_folder(options.out, f"redteam-{team.experiment.name}", options.resume) as lock:
        return _attack(team, lock.folder, options)


def _attack(team: RedTeam, folder: Path, options: argparse.Namespace) -> int:
    """Run a red team into a folder that is locked, and write its page."""
    from fedalign.experiments.redteam_runs import open_folder, run_cases
    from fedalign.experiments.redteam_table import table_of
    from fedalign.report.redteam_page import terminal_tables, write_redteam

    console, cases = Console(quiet=options.quiet, highlight=False), team.cases()
    with printed_notes() as notes:
        done, said = open_folder(team, folder, options.resume)
        notes += said
    left = [case for case in cases if case not in done]
    console.print(
        f"[bold]redteam-{escape(team.experiment.name)}[/]: {count(len(team.rules), 'rule')} × "
        f"{count(len(team.attacks), 'attack')} × {count(len(team.fractions), 'fraction')}, "
        f"{count(len(team.experiment.seeds), 'seed')}: {count(len(cases), 'run')} of "
        f"{count(team.experiment.rounds, 'round')}; output in {escape(str(folder))}"
    )
    if options.resume:
        console.print(f"{len(cases) - len(left):,} runs have finished, {len(left):,} are left")
    try:
        with _Bar(console, len(left), team.experiment.rounds) if not options.quiet else contextlib.nullcontext() as bar:
            run_cases(
                team,
                folder,
                done,
                most=options.stack,
                on_stack=bar.stack if bar is not None else lambda cases: None,
                on_round=bar.round if bar is not None else lambda: None,
            )
    except KeyboardInterrupt:
        error_console().print("[bold yellow]fedalign:[/] interrupted; finished runs are kept; add --resume to continue")
        return INTERRUPTED
    rows = table_of(team, done)
    written = write_redteam(team, rows, folder)
    for table in terminal_tables(team, rows):
        console.print(table)
    for path in written:
        console.print(f"  {escape(str(path))}", soft_wrap=True)
    if options.quiet:
        sys.stdout.write(f"{folder}\n")
    return 0


def _team(options: argparse.Namespace) -> RedTeam:
    from fedalign.attacks.catalogue import CATALOGUE
    from fedalign.experiments.redteam import FRACTIONS, RULES, plan_redteam, split_names

    overrides = dict(setting(pair) for pair in options.set)
    for name in ("seeds", "rounds", "device"):
        if getattr(options, name) is not None:
            overrides[name] = getattr(options, name)
    return plan_redteam(
        options.experiment,
        overrides,
        RULES if options.rules is None else split_names(options.rules),
        tuple(CATALOGUE) if options.attacks is None else split_names(options.attacks),
        FRACTIONS if options.fractions is None else [_number(part) for part in split_names(options.fractions)],
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise FedalignError(f"--fractions takes numbers such as 0.25,0.5, not {text!r}") from error


class _Bar:
    """A progress bar over the rounds of all runs, which names the attacks that are under way."""

    def __init__(self, console: Console, runs: int, rounds: int) -> None:
        self._bar = Progress(
            TextColumn("{task.fields[finished]:,} of {task.fields[runs]:,} runs"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[attacks]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._plain = None if console.is_terminal else PlainLines()
        self._runs, self._completed = runs, 0
        self._rounds, self._under_way, self._finished = rounds, 0, 0
        self._task = self._bar.add_task("runs", total=runs * rounds, finished=0, runs=runs, attacks="")

    def __enter__(self) -> _Bar:
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.__exit__(None, None, None)

    def stack(self, cases: Sequence[Case]) -> None:
        """Show that a stack begins, and that the one before has finished, runs that diverged early included."""
        self._finished += self._under_way
        self._under_way = len(cases)
        attacks = ", ".join(dict.fromkeys(case.attack for case in cases))
        self._bar.update(
            self._task, completed=self._finished * self._rounds, finished=self._finished, attacks=escape(attacks)
        )

    def round(self) -> None:
        """Show that one run has finished a round."""
        self._bar.advance(self._task)
        self._completed += 1
        if self._plain is not None:
            total = self._runs * self._rounds
            text = f"{self._finished:,} of {self._runs:,} runs, {100 * self._completed // total} % of all rounds"
            self._plain.show(self._completed, total, lambda: text)
