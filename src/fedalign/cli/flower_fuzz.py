"""``fedalign flower fuzz``: send hostile replies to a server in this process."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedalign.cli.options import Parser


def add(actions: argparse._SubParsersAction[Parser]) -> None:
    """Add ``fuzz`` to the actions of ``fedalign flower``."""
    action: Any = actions.add_parser(
        "fuzz", help="send hostile replies to a server in this process, and see that each is refused"
    )
    action.add_argument("--replies", type=int, default=10_000, metavar="N", help="how many (default: 10000)")
    action.add_argument("--seed", type=int, default=0, help="of the random changes (default: 0)")
    action.add_argument(
        "--trust", choices=("report", "verify"), default="report", help="the server's setting (default: report)"
    )
    action.set_defaults(command=_fuzz)


def _fuzz(options: argparse.Namespace) -> int:
    from fedalign.flower.fuzz import fuzz

    logging.getLogger("flwr").setLevel(logging.ERROR)  # thousands of warnings; the report counts them
    report = fuzz(options.replies, options.seed, options.trust)
    print("\n".join(report.lines()))
    return 1 if report.failures else 0
