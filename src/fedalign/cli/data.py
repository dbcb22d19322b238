"""``fedalign data``: download data sets, verify them, and plot how an experiment splits them among clients."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from fedalign.cli.notices import error_console, printed_notes
from fedalign.cli.options import BAD_INPUT, setting
from fedalign.errors import FedalignError, nearest

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands


def add(commands: Subcommands) -> None:
    """Add ``data`` to the subcommands of ``fedalign``."""
    command = commands.add_parser("data", help="download or verify data sets, or plot which client holds which classes")
    command.add_argument("action", choices=("get", "check", "show"), help="download, verify, or plot the partition")
    command.add_argument(
        "names", nargs="*", metavar="NAME", help="data sets (default: all); with show: experiments or .toml files"
    )
    command.add_argument(
        "--seed", type=int, default=0, metavar="S", help="with show: the seed of the partition (default: 0)"
    )
    command.add_argument(
        "--out",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="with show: the output folder (default: the current one)",
    )
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with show: change a setting")
    command.set_defaults(command=_data)


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
            got = f"downloaded {', '.join(str(path) for path in files)}" if files else DATASETS[name].describe()
            console.print(f"{name}: {escape(got)}", soft_wrap=True)
            continue
        try:
            console.print(f"{name}: {escape(DATASETS[name].check())}", soft_wrap=True)
        except FedalignError as error:
            if not options.names and not DATASETS[name].available():
                console.print(f"{name}: {escape(DATASETS[name].describe())}", soft_wrap=True)
                continue
            bad += 1
            error_console().print(f"[bold red]{name}:[/] {escape(str(error))}")
    return BAD_INPUT if bad else 0


def _show(options: argparse.Namespace, console: Console) -> int:
    from fedalign.experiments.config import load
    from fedalign.report import client_plots, plot_style

    if not options.names:
        raise FedalignError("data show needs the name of an experiment, as in fedalign data show fmnist")
    overrides = dict(setting(pair) for pair in options.set)
    for name in options.names:
        experiment = load(name, overrides)
        with printed_notes():
            federation = experiment.federation(options.seed)
        title = f"{experiment.name}, seed {options.seed}: samples by client and class"
        figure = client_plots.class_counts(federation, title)
        options.out.mkdir(parents=True, exist_ok=True)
        console.print(f"{escape(experiment.name)}: {escape(repr(federation))}")
        for path in plot_style.save(figure, options.out / f"{experiment.name}-seed-{options.seed}"):
            console.print(f"  {escape(str(path))}", soft_wrap=True)
    return 0
