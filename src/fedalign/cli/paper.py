"""``fedalign paper``: reproduce the figures of the paper, and check its claims."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from fedalign.cli.notices import printed_notes
from fedalign.cli.options import add_run_options
from fedalign.cli.run import simulate
from fedalign.errors import FedalignError

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands


def add(commands: Subcommands) -> None:
    """Add ``paper`` to the subcommands of ``fedalign``."""
    command = commands.add_parser("paper", help="reproduce the figures of the paper, and check its claims")
    command.add_argument("--figures", metavar="1,2", help="which figures (default: all)")
    command.add_argument(
        "--out", type=Path, default=Path("runs/paper"), metavar="DIR", help="the output folder (default: runs/paper)"
    )
    command.add_argument(
        "--from", dest="source", type=Path, metavar="DIR", help="use the summaries in DIR and run nothing"
    )
    command.add_argument("--page", type=Path, metavar="FILE.md", help="the results page (default: results.md in --out)")
    command.add_argument("--emnist", metavar="FOLDER", help="use the idx files in FOLDER in place of EMNIST")
    add_run_options(command)
    command.set_defaults(command=_paper)


def _paper(options: argparse.Namespace) -> int:
    from fedalign.paper.compact import compact, read_all, save
    from fedalign.paper.figures import FIGURES
    from fedalign.paper.results_page import write_page
    from fedalign.paper.runs import jobs
    from fedalign.report.read_runs import read_run

    console = Console(quiet=options.quiet, highlight=False)
    if options.source is None:
        numbers = list(FIGURES) if options.figures is None else _numbers(options.figures)
        overrides = {name: getattr(options, name) for name in ("seeds", "rounds", "device", "tf32")}
        overrides = {name: value for name, value in overrides.items() if value is not None}
        todo = jobs(numbers, options.out, overrides, options.emnist)
        with printed_notes():
            for job in todo:
                if not job.done:
                    job.experiment.federation(0)  # missing data must be reported now, not after hours
        for place, job in enumerate(todo, start=1):
            console.print(f"[bold]{place} of {len(todo)}[/]", end=" ")
            if job.done:
                console.print(f"{job.experiment.name}: finished before, in {escape(str(job.folder))}")
            else:
                started = (job.folder / "config.toml").is_file()
                simulate(job.experiment, job.folder, console, options, resume=started)
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
