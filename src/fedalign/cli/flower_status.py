"""``fedalign flower status`` and ``audit``: what the operator of a federation wants to know about a run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedalign.errors import FedalignError

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands

_WIDE, _FOR_WIDE = 120, ("samples", "loss", "weight")  # columns of a terminal, and what a narrower one leaves out
RUNS = Path("~/fedalign-runs")  #: where runs without the setting ``out`` are


def add(actions: Subcommands) -> None:
    """Add both to the actions of ``fedalign flower``."""
    where = f"the run's output folder (default: the newest one in {RUNS})"
    action = actions.add_parser("status", help="show where a run stands: its clients, quorum, and what it waits for")
    action.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=where)
    kinds = action.add_mutually_exclusive_group()
    kinds.add_argument("--json", action="store_true", help="print it as JSON")
    kinds.add_argument("--prometheus", action="store_true", help="print it in Prometheus' text format")
    kinds.add_argument(
        "--serve", action="store_true", help="serve a page with the live report, and /metrics, on this machine"
    )
    action.add_argument(
        "--port", type=int, default=None, metavar="N", help="with --serve: the port (default: any free port)"
    )
    action.set_defaults(command=_status)
    action = actions.add_parser("audit", help="show the audit log of a run")
    action.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=where)
    action.add_argument("--last", type=int, metavar="N", help="only the last N events")
    action.add_argument("--json", action="store_true", help="print a JSON object a line")
    action.set_defaults(command=_audit)


def _status(options: argparse.Namespace) -> int:
    from fedalign.monitoring.status import read_status
    from fedalign.monitoring.words import HEADINGS, client_row, sentences

    if options.port is not None and not options.serve:
        raise FedalignError("--port needs --serve")
    folder = options.folder or newest_run()
    status, now = read_status(folder), time.time()
    if options.serve or options.prometheus:
        return _live(folder, options)
    if options.json:
        sys.stdout.write(status.as_seen(now))
        return 0
    console = Console(highlight=False)
    console.print(f"{escape(str(folder))} (rule {escape(status.rule)})", soft_wrap=True)
    for sentence in sentences(status, now, str(folder)):
        console.print(f"  {escape(sentence)}", soft_wrap=True)
    shown = [i for i, heading in enumerate(HEADINGS) if console.width >= _WIDE or heading not in _FOR_WIDE]
    rows = [client_row(client, now) for client in status.clients]
    console.print(_table([HEADINGS[i] for i in shown], [[row[i] for i in shown] for row in rows]))
    return 0


def _live(folder: Path, options: argparse.Namespace) -> int:
    from fedalign.cli.report import serve
    from fedalign.monitoring.live_status import LiveStatus

    if options.serve:
        words = "The status and the report are at {address}, for Prometheus at {address}metrics,"
        return serve(lambda: LiveStatus(folder), options.port, words)
    sys.stdout.write(LiveStatus(folder).metrics().decode())
    return 0


def _audit(options: argparse.Namespace) -> int:
    import json

    from fedalign.monitoring import audit

    folder = options.folder or newest_run()
    if options.last is not None and options.last < 1:
        raise FedalignError(f"--last must be at least 1, not {options.last}")
    if not (folder / audit.NAME).is_file():
        raise FedalignError(
            f"{folder} has no {audit.NAME}: only runs over Flower have one, and not those of earlier versions"
        )
    events = audit.read(folder, options.last)
    if options.json:
        sys.stdout.writelines(json.dumps(event) + "\n" for event in events)
    else:
        Console(highlight=False).print(_table(audit.HEADINGS, [audit.event_row(event) for event in events]))
    return 0


def newest_run() -> Path:
    """Return the newest run's folder among those without the setting ``out``.

    Raises :class:`FedalignError` if there is none.
    """
    from fedalign.monitoring.status import NAME

    found = sorted(RUNS.expanduser().glob(f"*/{NAME}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FedalignError(f"{RUNS} has no run over Flower; give the run's output folder, its setting out")
    return found[-1].parent


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Make a table whose last column, a text, takes the lines that it needs."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading not in ("client", headings[-1]))
    for row in rows:
        table.add_row(*map(escape, row))
    return table
