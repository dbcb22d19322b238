"""Options that several commands share, and the reading of KEY=VALUE settings."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, NoReturn

from fedalign.errors import FedalignError
from fedalign.experiments.additions import read_seeds
from fedalign.settings.notation import read_value

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction["Parser"]


BAD_INPUT, DIVERGED, INTERRUPTED = 2, 3, 130  #: exit codes


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors as one sentence, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Raise a :class:`FedalignError` in place of argparse's usage text and exit."""
        raise FedalignError(f"{message} (see {self.prog} --help)")


def add_run_options(command: argparse.ArgumentParser) -> None:
    """Add the options of all commands that run experiments."""
    add_seeds(command)
    command.add_argument("--rounds", type=int, metavar="N", help="number of communication rounds")
    command.add_argument("--device", metavar="auto|cpu|cuda", help="the device to train on (default: auto)")
    command.add_argument(
        "--tf32", action="store_true", default=None, help="let a GPU multiply in TF32: faster, with 10-bit mantissas"
    )
    command.add_argument(
        "--on",
        choices=("here", "ray"),
        default="here",
        help="here: in this process; ray: distribute the runs over GPUs or machines with Ray",
    )
    command.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="with --on ray: number of workers (default: one per GPU, or one per machine)",
    )
    command.add_argument("--quiet", action="store_true", help="show no progress and no tables, only the output folder")


def add_seeds(command: argparse.ArgumentParser) -> None:
    """Add the option ``--seeds``."""
    command.add_argument(
        "--seeds", type=_seeds, metavar="N|S,T", help="number of seeds, counted from 0; or the seeds, as 3,4 or 3,"
    )


def _seeds(text: str) -> int | list[int]:
    try:
        return read_seeds(text)
    except FedalignError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def count(number: int, noun: str) -> str:
    """Write a number with its noun.

    >>> count(1, "arm"), count(1200, "run")
    ('1 arm', '1,200 runs')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def overrides_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the options of a command change, by name."""
    found: dict[str, Any] = {}
    found |= dict(setting(pair) for pair in options.set)
    if options.arms is not None:
        found["arms"] = [arm.strip() for arm in options.arms.split(",") if arm.strip()]
    if getattr(options, "track", None):
        found["track"] = [text for given in options.track for text in split_names(given)]
    for name in ("seeds", "rounds", "device", "tf32"):
        if getattr(options, name) is not None:
            found[name] = getattr(options, name)
    return found


def split_names(text: str) -> list[str]:
    """Split a list of names at commas that are not inside brackets, which hold options.

    >>> split_names("tensorboard, mlflow(uri='sqlite:///a.db', experiment='mine')")
    ['tensorboard', "mlflow(uri='sqlite:///a.db', experiment='mine')"]
    """
    parts = re.split(r",(?![^()]*\))", text)
    return [part.strip() for part in parts if part.strip()]


def setting(pair: str) -> tuple[str, Any]:
    """Split KEY=VALUE and read the value as TOML does, or as text if it is not TOML.

    >>> setting("local.lr=0.05"), setting("match=loss")
    (('local.lr', 0.05), ('match', 'loss'))
    """
    key, equals, text = pair.partition("=")
    if not equals or not key.strip():
        raise FedalignError(f"--set takes KEY=VALUE, as in --set local.lr=0.05, not {pair!r}")
    return key.strip(), read_value(text.strip())
