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
    """Add the command to the parser."""
    command = commands.add_parser("list", help="experiments, arms, data sets and all other names of settings")
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
    from fedalign import registry
    from fedalign.data.catalogue import DATASETS
    from fedalign.experiments.config import shipped

    console = Console()
    blocks = {
        "experiment": shipped(),
        "arm": registry.RULES.descriptions(),
        "data set": {n: d.describe() for n, d in DATASETS.items()},
        "data": registry.DATA.descriptions(),
        "model": registry.MODELS.descriptions(),
        "loss": registry.LOSSES.descriptions(),
        "local": registry.LOCAL_OPTIMIZERS.descriptions(),
        "aggregator": registry.AGGREGATORS.descriptions(),
        "server": registry.SERVER_OPTIMIZERS.descriptions(),
        "participation": registry.PARTICIPATION.descriptions(),
        "client_steps": registry.CLIENT_STEPS.descriptions(),
        "server_steps": registry.SERVER_STEPS.descriptions(),
        "adversary": registry.ATTACKS.descriptions(),
        "personal": registry.PERSONAL.descriptions(),
        "ledger": registry.VALUATIONS.descriptions(),
        "metrics": registry.METRICS.descriptions(),
        "callbacks": {
            name: text
            for name, text in registry.CALLBACKS.descriptions().items()
            if name not in registry.TRACKERS.entries
        },
        "track": registry.TRACKERS.descriptions(),
    }
    for heading, entries in blocks.items():
        table = Table(box=None, padding=(0, 2), title_justify="left")
        table.add_column(heading, style="bold", no_wrap=True)
        table.add_column("")
        for name, text in entries.items():
            table.add_row(name, text)
        console.print(table)
        console.print()
    console.print("Run an experiment with: fedalign run NAME", highlight=False)
    console.print("For anything of your own, write module:Name in place of a name.", highlight=False)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from fedalign.simulation.bench import run

    if options.repeats < 1:
        raise FedalignError(f"--repeats must be at least 1, not {options.repeats}")
    run(options.cases, options.repeats)
    return 0
