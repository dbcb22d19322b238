"""Seconds per round of the example federation, with real processes: a SuperLink, four SuperNodes, TLS.

    python benchmarks/flower_rounds.py [--rules fedalign,auto,verify] [--rounds 6]

`fedalign` and `auto` run with `trust = "report"`; `verify` is `auto` with `trust = "verify"`. The mean leaves out the
first round, which waits for connections. Each line also says how often the server waited for clients in a round.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "flower"))

_RULES = {
    "fedalign": {"rule": "fedalign", "trust": "report"},
    "auto": {"rule": "auto", "trust": "report"},
    "verify": {"rule": "auto", "trust": "verify"},
}
_LINE = re.compile(r"round (\d+) of \d+: .*?; ([\d.]+) s \(waiting: (.*?)\)")


def main() -> None:
    """Run each rule once and print a line for it."""
    from processes import started

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", default="fedalign,auto,verify")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    sites = ("site-0", "site-1", "site-2", "site-3")
    with tempfile.TemporaryDirectory(prefix="fa-") as folder, started(Path(folder), sites, 2, {}) as federation:
        for rule in options.rules.split(","):
            settings = {"epsilon": 0.6, "epochs": 5, "batch-size": 50, "warmup": 0.1, **_RULES[rule]}
            run = federation.run(rule, rounds=options.rounds, **settings)
            federation.finish(rule)
            said = federation.flwr("log", run, "here", "--show").stdout
            lines = [(int(t), float(seconds), waits) for t, seconds, waits in _LINE.findall(said.replace("\n", " "))]
            later = [seconds for t, seconds, _ in lines if t > 1]
            shown = ", ".join(f"{seconds:.1f}" for _, seconds, _ in lines)
            print(f"{rule:10} {sum(later) / max(1, len(later)):.1f} s a round ({shown})", flush=True)
            print(f"{'':10} last: {lines[-1][2] if lines else said[-2000:]}", flush=True)


if __name__ == "__main__":
    main()
