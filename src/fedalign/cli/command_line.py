"""The command line. Exit codes: 0 done, 2 bad input, 3 some run diverged (the others are whole), 130 interrupted."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.markup import escape

from fedalign.cli import data, flower, overview, paper, report, run, theory
from fedalign.cli.options import BAD_INPUT, INTERRUPTED, Parser
from fedalign.cli.speech import errors
from fedalign.errors import FedalignError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; give the exit code."""
    try:
        options = _parser().parse_args(arguments)
        code: int = options.command(options)
        return code
    except FedalignError as error:
        errors().print(f"[bold red]fedalign:[/] {escape(str(error))}")
        return BAD_INPUT
    except BrokenPipeError:
        return BAD_INPUT  # whoever read our output went away; there is nobody to tell
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        errors().print(
            f"[bold red]fedalign:[/] {escape(f'{where}{error.strerror or error}')}; finished rounds are kept"
        )
        return BAD_INPUT
    except KeyboardInterrupt:
        errors().print(
            "[bold yellow]fedalign:[/] interrupted; finished rounds are kept: the same command with --resume goes on"
        )
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    from fedalign import __version__

    parser = Parser(prog="fedalign", description="Prioritized federated learning.")
    parser.add_argument("--version", action="version", version=f"fedalign {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for module in (overview, run, report, paper, data, theory, flower):
        module.add(commands)
    return parser
