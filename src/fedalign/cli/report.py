"""``fedalign report``: write the plots, tables and HTML page of runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from fedalign.cli.notices import error_console

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands


def add(commands: Subcommands) -> None:
    """Add ``report`` to the subcommands of ``fedalign``."""
    command = commands.add_parser("report", help="write the plots, tables and HTML page of runs")
    command.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="output folders of runs")
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the output folder (default: that of the run, or report/ for several runs)",
    )
    command.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    from fedalign.report.page import write_report
    from fedalign.report.read_runs import read_run
    from fedalign.report.table import incentive_table, terminal_table

    console = Console(highlight=False)
    runs = [read_run(folder) for folder in options.folders]
    folder = options.out or (runs[0].folder if len(runs) == 1 else Path("report"))
    for run in runs:
        for what in run.missing:
            error_console().print(f"[yellow]unfinished:[/] {escape(str(run.folder))}: {escape(what)}")
        console.print(terminal_table(run.summary))
        if (gains := incentive_table(run.summary)) is not None:
            console.print(gains)
    report = write_report(runs, folder)
    for path in [report.page, *[p for p in report.pictures if p.suffix == ".png"]]:
        console.print(f"  {escape(str(path))}", soft_wrap=True)
    return 0
