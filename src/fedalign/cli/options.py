"""What several commands take: the options of runs, and settings as KEY=VALUE."""

from __future__ import annotations

import argparse
import tomllib
from typing import TYPE_CHECKING, Any, NoReturn

from fedalign.errors import FedalignError

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction["Parser"]


BAD_INPUT, DIVERGED, INTERRUPTED = 2, 3, 130  #: exit codes


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ours: one sentence, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise FedalignError(f"{message} (see {self.prog} --help)")


def add_run_options(command: argparse.ArgumentParser) -> None:
    """Add what every command that runs experiments takes."""
    command.add_argument("--seeds", type=int, metavar="N", help="how many seeds, counted from 0")
    command.add_argument("--rounds", type=int, metavar="N", help="how many communication rounds")
    command.add_argument("--device", metavar="auto|cpu|cuda", help="where to compute (default: auto)")
    command.add_argument(
        "--tf32", action="store_true", default=None, help="let a GPU multiply in TF32: faster, rounded to 10 bits"
    )
    command.add_argument(
        "--on", choices=("here", "ray"), default="here", help="ray: spread the runs over Ray's GPUs or machines"
    )
    command.add_argument(
        "--workers", type=int, metavar="N", help="with --on ray: how many (default: one a GPU, or one a machine)"
    )
    command.add_argument("--quiet", action="store_true", help="no progress and no table: only where the output is")


def overrides_of(options: argparse.Namespace) -> dict[str, Any]:
    """Collect the settings that a command line changes."""
    found: dict[str, Any] = {}
    found |= dict(setting(pair) for pair in options.set)
    if options.arms is not None:
        found["arms"] = [arm.strip() for arm in options.arms.split(",") if arm.strip()]
    for name in ("seeds", "rounds", "device", "tf32"):
        if getattr(options, name) is not None:
            found[name] = getattr(options, name)
    return found


def setting(pair: str) -> tuple[str, Any]:
    """Read KEY=VALUE."""
    key, equals, text = pair.partition("=")
    if not equals or not key.strip():
        raise FedalignError(f"--set takes KEY=VALUE, as in --set local.lr=0.05, not {pair!r}")
    return key.strip(), _value(text.strip())


def _value(text: str) -> Any:
    """Read a value as TOML does; what isn't TOML is a text, so that quotes aren't needed in the shell."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
