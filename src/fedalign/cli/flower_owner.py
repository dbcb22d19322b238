"""The parts of ``fedalign flower`` for a node's owner: the hash of an app, and what the node did."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedalign.errors import FedalignError
from fedalign.monitoring.words import printable

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands
    from fedalign.flower.node_summary import RunSummary


def add(actions: Subcommands) -> None:
    """Add ``hash`` and ``mine`` to the actions of ``fedalign flower``."""
    action = actions.add_parser("hash", help="print the SHA-256 of an app, for the setting apps of a node")
    action.add_argument("app", type=Path, metavar="APP", help="the app's folder, or the .fab file of flwr build")
    action.set_defaults(command=_hash)
    action = actions.add_parser(
        "mine", help="summarize a node's log: what it was asked and did, its losses, what it gave and got"
    )
    action.add_argument("log", type=Path, metavar="LOG", help="the file that the node's config names as log")
    action.add_argument("--json", action="store_true", help="print JSON")
    action.set_defaults(command=_mine)


def _hash(options: argparse.Namespace) -> int:
    from fedalign.flower.app_hash import app_hash

    print(app_hash(options.app))
    return 0


def _mine(options: argparse.Namespace) -> int:
    from fedalign.flower.node_log import NodeLog
    from fedalign.flower.node_summary import summarize
    from fedalign.flower.own_accounts import shown_account

    if not options.log.is_file():
        raise FedalignError(f'there is no log {options.log}; a node writes one if its config has log="FILE"')
    runs = summarize(NodeLog(options.log).lines())
    if options.json:
        print(json.dumps([run.as_json() for run in runs], indent=2))
        return 0
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2))
    for heading in ("run", "began", "last asked", "asked", "trained", "declined", "own loss", "priority loss"):
        table.add_column(heading)
    for run in runs:
        table.add_row(*_cells(run))
    console.print(table)
    for run in runs:
        if run.app:
            console.print(f"run {_shown(run.run)}: app {run.app}", soft_wrap=True)
        for reason, count in run.declined.most_common():
            console.print(f"run {_shown(run.run)}: declined {count} times: {_shown(reason)}", soft_wrap=True)
        for text in shown_account(run.account) if run.account else ():
            console.print(f"run {_shown(run.run)}: {_shown(text)}", soft_wrap=True)
        for path in dict.fromkeys(run.models):
            console.print(f"run {_shown(run.run)}: the final model is in {_shown(path)}", soft_wrap=True)
    return 0


def _cells(run: RunSummary) -> list[str]:
    asked = ", ".join(f"{count} {_shown(kind)}" for kind, count in sorted(run.asked.items()))
    times = [time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (run.first, run.last)]
    losses = [_first_and_last(values) for values in (run.losses, run.global_losses)]
    return [_shown(run.run), *times, asked, str(run.trained), str(run.declined.total()), *losses]


def _first_and_last(values: list[tuple[int, float]]) -> str:
    """Show the first and the last of some values by round.

    >>> _first_and_last([(0, 2.25), (3, 1.5)]), _first_and_last([])
    ('2.25 → 1.5', '')
    """
    return " → ".join(f"{value:.4g}" for _, value in ([values[0], values[-1]] if len(values) > 1 else values))


def _shown(text: str) -> str:
    """Write what a server sent, which a terminal must not obey."""
    return escape(printable(text))
