"""``fedalign report``: write the plots, tables and HTML page of runs, or serve the page while they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from fedalign.cli.notices import error_console
from fedalign.errors import FedalignError

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands
    from fedalign.report.serve import LiveReport


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
    command.add_argument(
        "--serve",
        action="store_true",
        help="serve the page on this machine and keep it up to date while the runs go on",
    )
    command.add_argument(
        "--port", type=int, default=None, metavar="N", help="with --serve: the port (default: any free port)"
    )
    command.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    if options.port is not None and not options.serve:
        raise FedalignError("--port needs --serve")
    return _serve(options) if options.serve else _write(options)


def _serve(options: argparse.Namespace) -> int:
    from fedalign.report.serve import LiveReport

    if options.out is not None:
        raise FedalignError("--serve writes nothing, so it takes no --out")
    return serve(lambda: LiveReport(options.folders), options.port, "The report is at {address}")


def serve(make: Callable[[], LiveReport], port: int | None, words: str) -> int:
    """Make a live report and serve it until Ctrl-C; ``words`` say where ``{address}`` is.

    Raises :class:`FedalignError` for a port that cannot be used, and for a damaged folder.
    """
    from fedalign.report.serve import ReportServer

    if port is not None and not 0 <= port <= 65535:
        raise FedalignError(f"--port must be from 0 to 65535, not {port}")
    report = make()
    report.data()  # a damaged folder is reported here, not to a browser
    with ReportServer(report, port or 0) as server:
        console = Console(highlight=False)
        where = words.format(address=server.address)
        console.print(f"{where} while this command runs. Press Ctrl-C to end it.", soft_wrap=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("ended")
    return 0


def _write(options: argparse.Namespace) -> int:
    from fedalign.report.page import write_report
    from fedalign.report.read_runs import read_run
    from fedalign.report.terminal import tables

    console = Console(highlight=False)
    runs = [read_run(folder) for folder in options.folders]
    folder = options.out or (runs[0].folder if len(runs) == 1 else Path("report"))
    for run in runs:
        for what in run.missing:
            error_console().print(f"[yellow]unfinished:[/] {escape(str(run.folder))}: {escape(what)}")
        console.print(*tables(run.summary), sep="\n")
    report = write_report(runs, folder)
    for path in [report.page, *[p for p in report.pictures if p.suffix == ".png"]]:
        console.print(f"  {escape(str(path))}", soft_wrap=True)
    return 0
