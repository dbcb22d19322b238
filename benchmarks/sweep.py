"""A sweep of 3 × 3 points × 3 seeds against nine separate runs: `python benchmarks/sweep.py [--rounds 200]`.

Both are timed as a user meets them: processes started from nothing, one after the other, output written.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EPSILONS, RATES = ("0.1", "0.2", "0.4"), ("0.05", "0.1", "0.2")


def seconds(*arguments: str) -> float:
    """Time one command."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "fedalign", *arguments, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment", default="synth-low")
    parser.add_argument("--rounds", default="200")
    parser.add_argument("--arms", help="default: the experiment's")
    options = parser.parse_args()
    common = ["--seeds", "3", "--rounds", options.rounds, "--device", "cpu"]
    common += ["--arms", options.arms] if options.arms else []
    with tempfile.TemporaryDirectory() as folder:
        axes = ["--set", f"epsilon={','.join(EPSILONS)}", "--set", f"local.lr={','.join(RATES)}"]
        sweep = seconds("sweep", options.experiment, *axes, *common, "--out", str(Path(folder, "sweep")))
        print(f"sweep: {sweep:.1f} s", flush=True)
        total = 0.0
        for number, (epsilon, rate) in enumerate(itertools.product(EPSILONS, RATES), start=1):
            point = ["--set", f"epsilon={epsilon}", "--set", f"local.lr={rate}"]
            one = seconds("run", options.experiment, *point, *common, "--out", str(Path(folder, str(number))))
            total += one
            print(f"run {number} of 9: {one:.1f} s", flush=True)
        print(f"nine runs: {total:.1f} s, {total / sweep:.1f} times as long as the sweep")


if __name__ == "__main__":
    main()
