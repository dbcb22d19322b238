"""FedALIGN's arms and their nearest rivals on every experiment, in several processes.

Prints, for each experiment, the final test accuracy of every arm (a mean over the seeds), and how far ``auto`` and
``blend`` are behind the best one. All runs of a job are stacked. With ``--out`` every result is written as soon as it
is there, and an interrupted benchmark continues where it stopped; ``table`` prints what a file has, without running
anything.

    python benchmarks/rivals.py [--only fmnist,alike-fmnist,…] [--arms auto,meritfed,…] [--seeds 5] [--rounds N]
                                [--device cuda] [--tf32] [--workers 13] [--emnist FOLDER] [--out FILE.jsonl] [--table]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path

OURS = ("priority", "all", "fedalign", "auto", "blend", "gradient", "trust", "fedalign-verified")
RIVALS = ("meritfed", "fedgp", "fedda", "fedgreed", "fedfomo", "maxfl", "finetune")
#: Other settings than the defaults, where a default may do a rule injustice.
VARIANTS = {
    "auto-calibrated": "auto(calibrated=true)",
    "fedgp-half": "fedgp(beta=0.5)",
    "fedda-half": "fedda(beta=0.5)",
}
ARMS = (*OURS, *RIVALS, *VARIANTS)
EXPERIMENTS = (
    "synth-low",
    "synth-medium",
    "synth-high",
    "fmnist",
    "various-fmnist-6",
    "emnist",
    "various-emnist-9",
    "various-emnist-18",
    "cifar10",
    "prox-fmnist",
    "prox-emnist",
    "partial-fmnist",
    "partial-emnist",
    "partial-cifar10",
    "local-fmnist",
    "local-emnist",
    "local-cifar10",
    "dirichlet-fmnist",
    "rotated-fmnist",
    "permuted-fmnist",
    "alike-fmnist",
)
JUDGED = ("auto", "blend")  # how far these are behind the best arm is told
Key = tuple[str, str, int, int]  # experiment, arm, seed, rounds
Job = tuple[str, tuple[str, ...], int, int | None, argparse.Namespace]


def experiment(name: str, arms: tuple[str, ...], seed: int, rounds: int | None, options: argparse.Namespace):
    """Load an experiment with some arms and one seed."""
    from fedalign.experiments.config import load

    changes = {"arms": list(arms), "seeds": [seed], "tf32": options.tf32}
    changes |= {f"arm.{arm}": rule for arm, rule in VARIANTS.items() if arm in arms}
    changes |= {"rounds": rounds} if rounds else {}
    changes |= {"data.folder": options.emnist} if options.emnist and "emnist" in name else {}
    return load(name, changes)


def stack(job: Job) -> list[dict]:
    """Run some arms of one experiment and seed together; a run that diverges has no accuracy."""
    import torch

    from fedalign.simulation.api import simulate_many

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    name, arms, seed, _, options = job
    loaded, began = experiment(*job), time.perf_counter()
    # The final figure is the mean of the last ten rounds, which are always measured.
    specs = [replace(spec, measure_every=loaded.rounds) for _, _, spec in loaded.specs()]
    results = simulate_many(specs, loaded.model, device=options.device, **loaded.engine_options())
    found = []
    for arm, result in zip(arms, results, strict=True):
        accuracy = None if result.error is not None else result.history.final("test_accuracy")
        cost = sum(record.models_down + record.models_up for record in result.history)
        row = {"experiment": name, "arm": arm, "seed": seed, "rounds": loaded.rounds, "models": cost}
        row["accuracy"] = None if accuracy is None else 100 * accuracy
        found.append({**row, "seconds": (time.perf_counter() - began) / len(arms)})
    return found


def jobs(options: argparse.Namespace, done: set[Key]) -> list[Job]:
    """List the stacks: all of one seed before the next, and small enough that all processes have work."""
    names = options.only.split(",") if options.only else EXPERIMENTS
    arms = options.arms.split(",") if options.arms else ARMS
    found: list[Job] = []
    for seed, name in product(range(options.first, options.first + options.seeds), names):
        rounds = experiment(name, ("priority",), seed, options.rounds, options).rounds
        left = [arm for arm in arms if (name, arm, seed, rounds) not in done]
        found += [
            (name, tuple(left[i : i + options.stack]), seed, options.rounds, options)
            for i in range(0, len(left), options.stack)
        ]
    return found


def table(rows: list[dict]) -> None:
    """Print one line for each experiment, bold within half a point of the best, and by how much ours are behind."""
    value: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["accuracy"] is not None:
            value.setdefault((row["experiment"], row["arm"]), []).append(row["accuracy"])
    names = list(dict.fromkeys([*EXPERIMENTS, *(row["experiment"] for row in rows)]))
    arms = [arm for arm in dict.fromkeys([*ARMS, *(row["arm"] for row in rows)]) if any(a == arm for _, a in value)]
    judged = [arm for arm in JUDGED if arm in arms]
    print("| experiment | " + " | ".join(f"`{arm}`" for arm in arms) + " | best | ", end="")
    print(" | ".join(f"`{arm}` behind" for arm in judged) + " |")
    print("|---" * (len(arms) + 2 + len(judged)) + "|")
    behind: dict[str, list[float]] = {arm: [] for arm in judged}
    for name in names:
        means = {arm: statistics.mean(value[name, arm]) for arm in arms if (name, arm) in value}
        if not means:
            continue
        best = max(means, key=means.__getitem__)
        cells = [cell(value.get((name, arm), []), means[best]) for arm in arms]
        lags = {arm: means[best] - means[arm] for arm in judged if arm in means}
        for arm, lag in lags.items():
            behind[arm].append(lag)
        shown = [f"{lags[arm]:.1f}" if arm in lags else "–" for arm in judged]
        print(f"| `{name}` | " + " | ".join([*cells, f"`{best}`", *shown]) + " |")
    for arm, found in behind.items():
        near = sum(lag <= 0.5 for lag in found)
        print(f"\n`{arm}` is within half a point of the best arm in {near} of {len(found)} experiments.")


def cell(found: list[float], best: float) -> str:
    """Show a mean and its standard deviation over the seeds; few seeds are told."""
    if not found:
        return "–"
    text = f"{statistics.mean(found):.1f}" + (f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else "")
    return f"**{text}**" if statistics.mean(found) >= best - 0.5 else text


def read(path: Path | None) -> list[dict]:
    """Read the results of a file; the last line may be cut off, if the process was ended while it wrote."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}: a line that cannot be read is left out", file=sys.stderr)
    return rows


def main() -> None:
    """Run all stacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="experiments, such as fmnist,alike-fmnist; default: all")
    parser.add_argument("--arms", default="", help="default: ours, the rivals, and two of them with fixed weights")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--rounds", type=int, help="default: the experiment's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--emnist", default="", help="a folder in place of the official EMNIST")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stack", type=int, default=4, help="how many arms of a seed run together")
    parser.add_argument("--out", type=Path, help="a file for all results, a line each; what it has is not run again")
    parser.add_argument("--table", action="store_true", help="print the table of --out, and run nothing")
    options = parser.parse_args()
    rows = read(options.out)
    if not options.table:
        done = {(row["experiment"], row["arm"], row["seed"], row["rounds"]) for row in rows}
        waiting = jobs(options, done)
        began = time.perf_counter()
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            for i, new in enumerate(pool.imap_unordered(stack, waiting), 1):
                rows += new
                if options.out:
                    with options.out.open("a", encoding="utf-8") as file:
                        file.writelines(json.dumps(row) + "\n" for row in new)
                        file.flush()
                named = f"{new[0]['experiment']}, seed {new[0]['seed']}: {', '.join(row['arm'] for row in new)}"
                spent = time.perf_counter() - began
                print(f"{i} of {len(waiting)} stacks, {spent:.0f} s: {named}", file=sys.stderr, flush=True)
    table(rows)


if __name__ == "__main__":
    main()
