"""The command line.

Exit codes: 0 success, 1 a changed ledger, 2 bad input, 3 some runs diverged (the others finished), 130 interrupted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.markup import escape

from fedalign.cli import completion, data, flower, ledger, overview, paper, redteam, report, run, sweep, theory
from fedalign.cli.notices import error_console
from fedalign.cli.options import BAD_INPUT, INTERRUPTED, Parser
from fedalign.errors import FedalignError
from fedalign.settings import user_modules


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments`` (default: those of the process) and return its exit code."""
    options = argparse.Namespace()
    try:
        make_parser().parse_args(arguments, options)
        code: int = options.command(options)
        return code
    except FedalignError as error:
        error_console().print(f"[bold red]fedalign:[/] {escape(str(error))}")
        return BAD_INPUT
    except BrokenPipeError:
        return BAD_INPUT  # the reader of our output has exited, so no message would arrive
    except KeyboardInterrupt:
        error_console().print(
            "[bold yellow]fedalign:[/] interrupted; finished rounds are kept; add --resume to continue"
        )
        return INTERRUPTED
    except Exception as error:
        words = user_modules.blame(error)
        if words is not None:
            words = f"your own code failed: {words}"
        elif isinstance(error, OSError):
            words = f"{error.filename}: " if error.filename else ""
            words += error.strerror or str(error)
        else:
            raise
        kept = "; finished rounds are kept" if hasattr(options, "resume") else ""
        error_console().print(f"[bold red]fedalign:[/] {escape(words)}{kept}")
        return BAD_INPUT


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line."""
    from fedalign import __version__

    parser = Parser(prog="fedalign", description="Prioritized federated learning with FedALIGN.")
    parser.add_argument("--version", action="version", version=f"fedalign {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for module in (overview, run, sweep, redteam, report, ledger, paper, data, theory, flower, completion):
        module.add(commands)
    return parser
