"""A sweep of 3 × 3 points × 3 seeds against nine separate runs: `python benchmarks/sweep.py [--rounds 200]`.

Both are timed as a user meets them: processes started from nothing, one after the other, output written.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EPSILONS, RATES = ("0.1", "0.2", "0.4"), ("0.05", "0.1", "0.2")


def seconds(*arguments: str) -> tuple[float, float]:
    """Time one command: by the clock, and of all processors."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "fedalign", *arguments, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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
        sweep, sweep_work = seconds("sweep", options.experiment, *axes, *common, "--out", str(Path(folder, "sweep")))
        print(f"sweep: {sweep:.1f} s ({sweep_work:.1f} s of processors)", flush=True)
        total = work = 0.0
        for number, (epsilon, rate) in enumerate(itertools.product(EPSILONS, RATES), start=1):
            point = ["--set", f"epsilon={epsilon}", "--set", f"local.lr={rate}"]
            one, one_work = seconds("run", options.experiment, *point, *common, "--out", str(Path(folder, str(number))))
            total, work = total + one, work + one_work
            print(f"run {number} of 9: {one:.1f} s ({one_work:.1f} s of processors)", flush=True)
        print(f"nine runs: {total:.1f} s, {total / sweep:.1f} times as long as the sweep")
        print(f"in processors' time: {work:.1f} s, {work / sweep_work:.1f} times as much")


if __name__ == "__main__":
    main()
