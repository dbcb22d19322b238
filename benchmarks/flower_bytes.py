"""Bytes, models and messages that a round costs a client over Flower, with nodes in one process.

    python benchmarks/flower_bytes.py [--parameters 10000000] [--rounds 4] [--rules fedalign,auto,verify] [--nodes 2+2]

A line for each rule and format of the numbers: the most megabytes (10^6 bytes) that a priority client and a free client
received and sent in a round, without the first one and the last one, whose model is measured once more at the end.
`--nodes 4+16` are four priority and 16 free ones. `fedalign` and `auto` run with `trust = "report"`; `verify` is `auto`
with `trust = "verify"`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "flower"))

_RULES = {"fedalign": ("fedalign", "report"), "auto": ("auto", "report"), "verify": ("auto", "verify")}


def main() -> None:
    """Measure every rule in every format and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rules", default="fedalign,auto,verify")
    parser.add_argument("--transports", default="exact,bfloat16")
    parser.add_argument("--nodes", default="2+2", help="priority and free nodes")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    for rule in options.rules.split(","):
        for transport in options.transports.split(","):
            with tempfile.TemporaryDirectory(prefix="fa-") as cache:
                os.environ["FEDALIGN_CACHE"] = cache
                print(_line(rule, transport, options), flush=True)


def _line(rule: str, transport: str, options: argparse.Namespace) -> str:
    from bandwidth import measure

    name, trust = _RULES[rule]
    priority, free = map(int, options.nodes.split("+"))
    began = time.monotonic()
    found, _ = measure(
        options.rounds, options.parameters, priority, priority + free, rule=name, trust=trust, transport=transport
    )
    shown = []
    for role, node in (("priority", 1), ("free", priority + free)):
        down, up, models, messages = (
            max(getattr(traffic, what).get(node, 0) for traffic in found[1:-1])
            for what in ("down", "up", "models", "messages")
        )
        shown.append(f"{role} {down / 1e6:.1f} MB down ({models} models, {messages} messages), {up / 1e6:.1f} MB up")
    return f"{rule:9} {transport:9} {'; '.join(shown)}; {time.monotonic() - began:.0f} s"


if __name__ == "__main__":
    main()
