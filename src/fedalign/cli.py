"""The command line. Exit codes: 0 done, 2 bad input, 3 some run diverged (the others are whole), 130 interrupted."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedalign.errors import FedalignError, FederationWarning, nearest

if TYPE_CHECKING:
    from fedalign.experiments.config import Experiment
    from fedalign.experiments.runner import Outcome

BAD_INPUT, DIVERGED, INTERRUPTED = 2, 3, 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FedalignError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; give the exit code."""
    try:
        options = _parser().parse_args(arguments)
        code: int = options.command(options)
        return code
    except FedalignError as error:
        _errors().print(f"[bold red]fedalign:[/] {escape(str(error))}")
        return BAD_INPUT
    except BrokenPipeError:
        return BAD_INPUT  # whoever read our output went away; there is nobody to tell
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _errors().print(
            f"[bold red]fedalign:[/] {escape(f'{where}{error.strerror or error}')}; finished rounds are kept"
        )
        return BAD_INPUT
    except KeyboardInterrupt:
        _errors().print(
            "[bold yellow]fedalign:[/] interrupted; finished rounds are kept: the same command with --resume goes on"
        )
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    from fedalign import __version__

    parser = _Parser(prog="fedalign", description="Prioritized federated learning.")
    parser.add_argument("--version", action="version", version=f"fedalign {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    command = commands.add_parser("list", help="experiments, arms and data sets")
    command.set_defaults(command=_list)

    command = commands.add_parser("run", help="run an experiment")
    command.add_argument("experiment", metavar="NAME|FILE.toml", help="an experiment's name, or a file of your own")
    command.add_argument("--arms", metavar="A,B", help="which arms to compare")
    _add_run_options(command)
    command.add_argument("--out", type=Path, metavar="DIR", help="the output folder (default: runs/NAME)")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting, as local.lr=0.05; repeatable",
    )
    command.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    command.set_defaults(command=_run)

    command = commands.add_parser("report", help="plots, table and page of finished runs")
    command.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    command.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: the run's own folder)")
    command.set_defaults(command=_report)

    command = commands.add_parser("paper", help="the paper's figures, and which of its claims hold")
    command.add_argument("--figures", metavar="1,2", help="which figures (default: all)")
    command.add_argument("--out", type=Path, default=Path("runs/paper"), metavar="DIR", help="default: runs/paper")
    command.add_argument("--from", dest="source", type=Path, metavar="DIR", help="run nothing: use these summaries")
    command.add_argument("--page", type=Path, metavar="FILE.md", help="the page (default: results.md in --out)")
    command.add_argument("--emnist", metavar="FOLDER", help="idx files to use in place of EMNIST's own")
    _add_run_options(command)
    command.set_defaults(command=_paper)

    command = commands.add_parser("bench", help="batched engine against the reference loop, in some minutes")
    command.add_argument("cases", nargs="*", metavar="CASE", help="logistic, network, cnn, synth-medium (default: all)")
    command.add_argument("--repeats", type=int, default=3, metavar="N", help="the best of N counts (default: 3)")
    command.set_defaults(command=_bench)

    command = commands.add_parser("data", help="data sets: get them, check them, see who holds what")
    command.add_argument("action", choices=("get", "check", "show"))
    command.add_argument(
        "names", nargs="*", metavar="NAME", help="data sets (default: all); with show, experiments or .toml files"
    )
    command.add_argument("--seed", type=int, default=0, metavar="S", help="with show: whose partition (default: 0)")
    command.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="with show: where to write (default: here)"
    )
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with show: any setting")
    command.set_defaults(command=_data)

    command = commands.add_parser("flower", help="a real federation: create a Flower app, keep its roster")
    actions = command.add_subparsers(required=True, metavar="ACTION", parser_class=_Parser)
    action = actions.add_parser("new", help="create a Flower app with a working example")
    action.add_argument("folder", type=Path, metavar="DIR")
    action.set_defaults(command=_flower_new)
    roster = actions.add_parser("roster", help="who is who, by their keys")
    steps = roster.add_subparsers(required=True, metavar="add|show", parser_class=_Parser)
    for name, what in (("add", "add a client, or change it"), ("show", "list the clients")):
        step = steps.add_parser(name, help=what)
        if name == "add":
            step.add_argument("key", type=Path, metavar="KEY.pub", help="the node's public key")
            step.add_argument("--name", help="the client's name (default: the key file's)")
            step.add_argument("--priority", action="store_true", help="a priority client")
            step.add_argument("--samples", type=int, metavar="N", help="count at most so many of its samples")
        step.add_argument(
            "--roster", type=Path, default=Path("roster.toml"), metavar="FILE", help="default: roster.toml"
        )
        step.set_defaults(command=_flower_roster, add=name == "add")
    return parser


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--seeds", type=int, metavar="N", help="how many seeds, counted from 0")
    command.add_argument("--rounds", type=int, metavar="N", help="how many communication rounds")
    command.add_argument("--device", metavar="auto|cpu|cuda", help="where to compute (default: auto)")
    command.add_argument(
        "--tf32", action="store_true", default=None, help="let a GPU multiply in TF32: faster, rounded to 10 bits"
    )
    command.add_argument(
        "--on", choices=("here", "ray"), default="here", help="ray: spread the runs over Ray's GPUs or machines"
    )
    command.add_argument(
        "--workers", type=int, metavar="N", help="with --on ray: how many (default: one a GPU, or one a machine)"
    )
    command.add_argument("--quiet", action="store_true", help="no progress and no table: only where the output is")


def _list(options: argparse.Namespace) -> int:
    from fedalign.data.catalogue import DATASETS
    from fedalign.experiments.config import ARMS, shipped

    console = Console()
    blocks = {
        "experiment": shipped(),
        "arm": ARMS,
        "data set": {n: d.describe() for n, d in DATASETS.items()},
    }
    for heading, entries in blocks.items():
        table = Table(box=None, padding=(0, 2), title_justify="left")
        table.add_column(heading, style="bold", no_wrap=True)
        table.add_column("")
        for name, text in entries.items():
            table.add_row(name, text)
        console.print(table)
        console.print()
    console.print("Run one with: fedalign run NAME", highlight=False)
    return 0


def _run(options: argparse.Namespace) -> int:
    from fedalign.experiments.config import load
    from fedalign.experiments.runner import free_folder, latest_folder
    from fedalign.report.load import read_run
    from fedalign.report.page import write_report
    from fedalign.report.table import incentive_table, terminal_table

    if options.workers is not None and options.on != "ray":
        raise FedalignError("--workers goes with --on ray")
    console = Console(quiet=options.quiet, highlight=False)
    experiment = load(options.experiment, _overrides(options))
    folder: Path = options.out or (latest_folder if options.resume else free_folder)(experiment.name)
    outcome = _simulate(experiment, folder, console, options, resume=options.resume)
    console.print(terminal_table(outcome.summary))
    if (gains := incentive_table(outcome.summary)) is not None:
        console.print(gains)
    report = write_report([read_run(folder)], folder)
    for path in [folder / "summary.json", report.page, *[p for p in report.pictures if p.suffix == ".png"]]:
        console.print(f"  {escape(str(path))}", soft_wrap=True)
    if options.quiet:
        sys.stdout.write(f"{folder}\n")
    return DIVERGED if outcome.diverged else 0


def _simulate(
    experiment: Experiment, folder: Path, console: Console, options: argparse.Namespace, *, resume: bool
) -> Outcome:
    """Check an experiment, say what is about to happen, run it with progress, and say which runs diverged."""
    from fedalign.experiments.runner import execute, prepare
    from fedalign.progress import ExperimentProgress

    with _notes_said() as notes:
        prepared = prepare(
            experiment, folder, resume=resume, device=experiment.device, on=options.on, workers=options.workers
        )
        notes += prepared.notes
    console.print(
        f"[bold]{escape(experiment.name)}[/]: {len(experiment.arms)} arms × {len(experiment.seeds)} seeds, "
        f"{experiment.rounds} rounds, on {prepared.device}; output in {escape(str(folder))}"
    )
    if resume:
        console.print(
            f"going on from round {prepared.start} of {experiment.rounds}; "
            f"{len(prepared.live)} of {len(prepared.runs)} runs to do"
        )
    with contextlib.ExitStack() as stack:
        show = None
        if not options.quiet:
            progress = ExperimentProgress(console, experiment.arms, experiment.rounds, prepared.start)
            show = stack.enter_context(progress).update
        outcome = execute(prepared, show) if show else execute(prepared)
    for arm, failed in outcome.diverged.items():
        for seed, message in failed.items():
            _errors().print(f"[bold red]{escape(arm)}, seed {seed}:[/] {escape(message)}")
    return outcome


def _paper(options: argparse.Namespace) -> int:
    from fedalign.paper.compact import compact, read_all, save
    from fedalign.paper.figures import FIGURES
    from fedalign.paper.jobs import jobs
    from fedalign.paper.page import write_page
    from fedalign.report.load import read_run

    console = Console(quiet=options.quiet, highlight=False)
    if options.source is None:
        numbers = list(FIGURES) if options.figures is None else _numbers(options.figures)
        overrides = {name: getattr(options, name) for name in ("seeds", "rounds", "device", "tf32")}
        overrides = {name: value for name, value in overrides.items() if value is not None}
        todo = jobs(numbers, options.out, overrides, options.emnist)
        with _notes_said():
            for job in todo:
                if not job.done:
                    job.experiment.federation(0)  # is the data there? Better said now than after hours
        for place, job in enumerate(todo, start=1):
            console.print(f"[bold]{place} of {len(todo)}[/]", end=" ")
            if job.done:
                console.print(f"{job.experiment.name}: done already, in {escape(str(job.folder))}")
            else:
                started = (job.folder / "config.toml").is_file()
                _simulate(job.experiment, job.folder, console, options, resume=started)
            save(compact(read_run(job.folder)), options.out / "summaries")
    source: Path = options.source or options.out / "summaries"
    page: Path = options.page or options.out / "results.md"
    for path in write_page(read_all(source), source, page):
        console.print(f"  {escape(str(path))}", soft_wrap=True)
    if options.quiet:
        sys.stdout.write(f"{page}\n")
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise FedalignError(f"--figures takes numbers, as in --figures 1,2, not {text!r}") from None


@contextlib.contextmanager
def _notes_said() -> Iterator[list[str]]:
    """Collect warnings about federations, and notes, and say each once."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FederationWarning)
        yield notes
    for note in dict.fromkeys([*(str(w.message) for w in caught), *notes]):
        _errors().print(f"[yellow]note:[/] {escape(note)}")


def _report(options: argparse.Namespace) -> int:
    from fedalign.report.load import read_run
    from fedalign.report.page import write_report
    from fedalign.report.table import incentive_table, terminal_table

    console = Console(highlight=False)
    runs = [read_run(folder) for folder in options.folders]
    folder = options.out or (runs[0].folder if len(runs) == 1 else Path("report"))
    for run in runs:
        console.print(terminal_table(run.summary))
        if (gains := incentive_table(run.summary)) is not None:
            console.print(gains)
    report = write_report(runs, folder)
    for path in [report.page, *[p for p in report.pictures if p.suffix == ".png"]]:
        console.print(f"  {escape(str(path))}", soft_wrap=True)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from fedalign.bench import run

    if options.repeats < 1:
        raise FedalignError(f"--repeats must be at least 1, not {options.repeats}")
    run(options.cases, options.repeats)
    return 0


def _data(options: argparse.Namespace) -> int:
    from fedalign.data.catalogue import DATASETS

    console = Console(highlight=False)
    if options.action == "show":
        return _show(options, console)
    for name in options.names:
        if name not in DATASETS:
            raise FedalignError(f"unknown data set {name!r}; {nearest(name, DATASETS)}")
    bad = 0
    for name in options.names or DATASETS:
        if options.action == "get":
            files = DATASETS[name].get(console)
            got = f"got {', '.join(str(path) for path in files)}" if files else DATASETS[name].describe()
            console.print(f"{name}: {escape(got)}", soft_wrap=True)
            continue
        try:
            console.print(f"{name}: {escape(DATASETS[name].check())}", soft_wrap=True)
        except FedalignError as error:
            if not options.names and not DATASETS[name].at_hand():
                console.print(f"{name}: {escape(DATASETS[name].describe())}", soft_wrap=True)
                continue
            bad += 1
            _errors().print(f"[bold red]{name}:[/] {escape(str(error))}")
    return BAD_INPUT if bad else 0


def _show(options: argparse.Namespace, console: Console) -> int:
    from fedalign.experiments.config import load
    from fedalign.report import plots

    if not options.names:
        raise FedalignError("name an experiment to show: fedalign data show fmnist")
    overrides = dict(_setting(pair) for pair in options.set)
    for name in options.names:
        experiment = load(name, overrides)
        with _notes_said():
            federation = experiment.federation(options.seed)
        figure = plots.holdings(federation, f"{experiment.name}, seed {options.seed}: who holds what")
        options.out.mkdir(parents=True, exist_ok=True)
        console.print(f"{escape(experiment.name)}: {escape(repr(federation))}")
        for path in plots.save(figure, options.out / f"{experiment.name}-seed-{options.seed}"):
            console.print(f"  {escape(str(path))}", soft_wrap=True)
    return 0


def _flower_new(options: argparse.Namespace) -> int:
    from fedalign.flower.new import create

    console = Console(highlight=False)
    for path in create(options.folder):
        console.print(f"  {escape(str(path))}", soft_wrap=True)
    console.print(f"Next: change the functions in {escape(str(options.folder))}'s task.py, then see docs/deploy.md.")
    return 0


def _flower_roster(options: argparse.Namespace) -> int:
    from fedalign.flower.roster import Entry, RosterFile, fingerprint

    console = Console(highlight=False)
    path: Path = options.roster
    roster = RosterFile.read(path) if path.exists() or not options.add else RosterFile(())
    if options.add:
        key = fingerprint(options.key.read_bytes())
        roster = roster.adding(Entry(key, options.name or options.key.stem, options.priority, options.samples))
        roster.write(path)
    table = Table(box=None, padding=(0, 2))
    for heading in ("name", "role", "samples", "key (SHA-256)"):
        table.add_column(heading)
    for entry in roster.entries:
        cap = "" if entry.samples is None else f"at most {entry.samples}"
        table.add_row(escape(entry.name), "priority" if entry.priority else "free", cap, f"{entry.key[:16]}…")
    console.print(table)
    console.print(f"other keys: {'free clients' if roster.unknown == 'free' else 'refused'}; {escape(str(path))}")
    return 0


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found |= dict(_setting(pair) for pair in options.set)
    if options.arms is not None:
        found["arms"] = [arm.strip() for arm in options.arms.split(",") if arm.strip()]
    for name in ("seeds", "rounds", "device", "tf32"):
        if getattr(options, name) is not None:
            found[name] = getattr(options, name)
    return found


def _setting(pair: str) -> tuple[str, Any]:
    key, equals, text = pair.partition("=")
    if not equals or not key.strip():
        raise FedalignError(f"--set takes KEY=VALUE, as in --set local.lr=0.05, not {pair!r}")
    return key.strip(), _value(text.strip())


def _value(text: str) -> Any:
    """Read a value as TOML does; what isn't TOML is a text, so that quotes aren't needed in the shell."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _errors() -> Console:
    """Speak on the standard error stream: errors, and notes that must be heard also with --quiet."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
