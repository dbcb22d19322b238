"""Bytes that a round costs a client over Flower: nodes in one process, two priority and two free ones.

    python benchmarks/flower_bytes.py [--parameters 10000000] [--rounds 4] [--rules fedalign,auto,verify]

A line for each rule and format of the numbers: the most megabytes (10^6 bytes) that a priority client and a free client
received and sent in a round, after the first one. `fedalign` and `auto` run with `trust = "report"`; `verify` is `auto`
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
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    for rule in options.rules.split(","):
        for transport in options.transports.split(","):
            with tempfile.TemporaryDirectory(prefix="fa-") as cache:
                os.environ["FEDALIGN_CACHE"] = cache
                print(_line(rule, transport, options.parameters, options.rounds), flush=True)


def _line(rule: str, transport: str, parameters: int, rounds: int) -> str:
    from bandwidth import NODES, measure

    name, trust = _RULES[rule]
    began = time.monotonic()
    found, records = measure(rounds, parameters, rule=name, trust=trust, transport=transport)
    shown = []
    for role, node in (("priority", 1), ("free", NODES)):
        down, up = (max(getattr(traffic, way).get(node, 0) for traffic in found[1:]) for way in ("down", "up"))
        models = max(traffic.models.get(node, 0) for traffic in found[1:])
        shown.append(f"{role} {down / 1e6:.1f} MB down ({models} models), {up / 1e6:.1f} MB up")
    tried = max(len(record.tried) for record in records)
    seconds = time.monotonic() - began
    return f"{rule:9} {transport:9} {'; '.join(shown)}; at most {tried} candidates; {seconds:.0f} s"


if __name__ == "__main__":
    main()
