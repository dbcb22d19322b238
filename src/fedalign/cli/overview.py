"""``fedalign list`` and ``fedalign bench``: what can be run, and how fast it runs on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from fedalign.errors import FedalignError

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands


def add(commands: Subcommands) -> None:
    """Add ``list`` and ``bench`` to the subcommands of ``fedalign``."""
    command = commands.add_parser("list", help="list the experiments, arms and data sets")
    command.set_defaults(command=_list)

    command = commands.add_parser(
        "bench", help="compare the speed of the batched engine and the reference engine, in a few minutes"
    )
    command.add_argument("cases", nargs="*", metavar="CASE", help="logistic, network, cnn, synth-medium (default: all)")
    command.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="repeat N times and take the best (default: 3)"
    )
    command.set_defaults(command=_bench)


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


def _bench(options: argparse.Namespace) -> int:
    from fedalign.simulation.bench import run

    if options.repeats < 1:
        raise FedalignError(f"--repeats must be at least 1, not {options.repeats}")
    run(options.cases, options.repeats)
    return 0
