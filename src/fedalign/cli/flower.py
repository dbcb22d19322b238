"""``fedalign flower``: create a Flower app, edit its roster, run a node, and see what it and the server did."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedalign.cli import flower_fuzz, flower_owner, flower_status
from fedalign.cli.options import Parser, setting
from fedalign.errors import FedalignError

if TYPE_CHECKING:
    from fedalign.cli.options import Subcommands
    from fedalign.flower.roster_file import RosterFile


def add(commands: Subcommands) -> None:
    """Add ``flower`` to the subcommands of ``fedalign``."""
    command = commands.add_parser(
        "flower", help="deploy a real federation: create a Flower app, edit its roster, run a node"
    )
    actions = command.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)
    action = actions.add_parser("new", help="create a Flower app with a working example")
    action.add_argument("folder", type=Path, metavar="DIR", help="the folder to create")
    action.add_argument(
        "--from", dest="experiment", metavar="NAME|FILE.toml", help="an experiment whose settings the app gets"
    )
    action.add_argument("--arm", metavar="NAME", help="the arm of the experiment, where it has several")
    action.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of it; repeatable"
    )
    action.set_defaults(command=_flower_new)
    # All arguments go to flower-supernode, even `--help`; with this prefix argparse sees no options.
    action = actions.add_parser(
        "node", help="run flower-supernode with its owner's limits and fast client start-up", prefix_chars="\0"
    )
    action.add_argument("arguments", nargs="*", metavar="…")
    action.set_defaults(command=_flower_node)
    flower_status.add(actions)
    flower_fuzz.add(actions)
    roster = actions.add_parser("roster", help="list the clients and their roles, by public key")
    steps = roster.add_subparsers(required=True, metavar="add|remove|show", parser_class=Parser)
    for name, what, change in (
        ("add", "add or change a client", _with_client),
        ("remove", "remove a client", _without_client),
        ("show", "list the clients", None),
    ):
        step = steps.add_parser(name, help=what)
        if name == "add":
            step.add_argument("key", type=Path, metavar="KEY.pub", help="the public key of the client's node")
            step.add_argument("--name", help="the client's name (default: the name of the key file)")
            step.add_argument("--priority", action="store_true", help="make it a priority client")
            step.add_argument("--replace", action="store_true", help="give the client of this name a new key")
            step.add_argument("--samples", type=int, metavar="N", help="count at most N of its samples")
            step.add_argument(
                "--model", action=argparse.BooleanOptionalAction, help="may it have the final model, or not"
            )
        elif name == "remove":
            step.add_argument("client", metavar="NAME|KEY.pub", help="the client's name, or its public key")
        step.add_argument(
            "--roster",
            type=Path,
            default=Path("roster.toml"),
            metavar="FILE",
            help="the roster file (default: roster.toml)",
        )
        step.set_defaults(command=_flower_roster, change=change, makes=name == "add")
    flower_owner.add(actions)


def _flower_new(options: argparse.Namespace) -> int:
    from fedalign.experiments.config import load
    from fedalign.flower.from_experiment import choose_arm, trust_notice
    from fedalign.flower.new_app import create

    if options.experiment is None and (options.arm or options.set):
        raise FedalignError("--arm and --set need --from, which names the experiment")
    made = load(options.experiment, dict(map(setting, options.set))) if options.experiment is not None else None
    console = Console(highlight=False)
    for path in create(options.folder, made, options.arm):
        console.print(f"  {escape(str(path))}", soft_wrap=True)
    if made is not None and (notice := trust_notice(made.settings, choose_arm(made.settings, options.arm))):
        console.print(notice)
    console.print(f"Next: edit the functions in task.py in {escape(str(options.folder))}, then follow docs/deploy.md.")
    return 0


def _flower_node(options: argparse.Namespace) -> int:
    from fedalign.flower.start_node import node

    node(options.arguments)


def _flower_roster(options: argparse.Namespace) -> int:
    from fedalign.flower.roster_file import RosterFile

    console = Console(highlight=False)
    path: Path = options.roster
    roster = RosterFile.read(path) if path.exists() or not options.makes else RosterFile(())
    if options.change is not None:
        roster = options.change(roster, options)
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


def _with_client(roster: RosterFile, options: argparse.Namespace) -> RosterFile:
    from fedalign.flower.roster_file import Entry

    name = options.key.stem if options.name is None else options.name
    entry = Entry(_key_in(options.key), name, options.priority, options.samples, options.model)
    return roster.adding(entry, options.replace)


def _without_client(roster: RosterFile, options: argparse.Namespace) -> RosterFile:
    path = Path(options.client)
    listed = any(options.client in (entry.name, entry.key) for entry in roster.entries)
    return roster.removing(options.client if listed or not path.is_file() else _key_in(path))


def _key_in(path: Path) -> str:
    from fedalign.flower.roster_file import fingerprint

    try:
        return fingerprint(path.read_bytes())
    except OSError as error:
        raise FedalignError(f"cannot read {path}: {error.strerror}") from error
    except FedalignError as error:
        raise FedalignError(f"{path}: {error}") from error
