"""The verified rule against hostile free clients on nine federations, in several processes.

Fashion-MNIST, EMNIST-47 and CIFAR-10, each IID, Dirichlet(0.5) and in shards of two classes: 4 priority and 16 free
clients of 240 samples, a logistic model, 40 rounds. Prints, for each federation, the gain over ``priority`` without
attack, and the worst case over the attacks beside the gain of the honest clients alone (the attack ``zero``).

    python benchmarks/trust.py [--only fmnist-iid,…] [--seeds 5] [--device cuda] [--workers 13] [--out FILE.jsonl]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import warnings
from itertools import product
from pathlib import Path

DATA = {"fmnist": ("FashionMnist", 784, 10), "emnist": ("Emnist", 784, 47), "cifar10": ("Cifar10", 3072, 10)}
PARTITIONS = ("iid", "dirichlet", "shards")
ATTACKS = {
    "zero": {"kind": "zero"},
    "label-flip": {"kind": "label-flip"},
    "label-flip, samples ×10": {"kind": "label-flip", "samples": 10.0},
    "sign-flip ×9.9": {"kind": "sign-flip(scale=9.9)"},
    "sign-flip": {"kind": "sign-flip"},
    "harmful ×9.9": {"kind": "harmful-direction(cosine=0.01, length=9.9)"},
    "harmful": {"kind": "harmful-direction(cosine=0.01, length=1.0)"},
    "harmful, cosine 0.3": {"kind": "harmful-direction(cosine=0.3, length=1.0)"},
    "sleeper": {"kind": "harmful-direction(cosine=0.01, length=9.9)", "start": 0.5},
    "strike": {"kind": "sign-flip(scale=9.9)", "last": 3},
    "on-off": {"kind": "harmful-direction(cosine=0.01, length=1.0)", "period": 2},
    "ALIE": {"kind": "alie"},
    "IPM": {"kind": "ipm"},
    "Min-Max": {"kind": "min-max"},
    "Min-Sum": {"kind": "min-sum"},
    "backdoor": {"kind": "backdoor"},
    "backdoor, crafted": {"kind": ["backdoor", "at-cosine(cosine=0.3)"]},
}
FRACTIONS = (0.25, 0.5, 0.75)
VERIFIED = "fedalign-verified"


def federation(data: str, partition: str, seed: int):
    """Split one of the data sets among 20 clients."""
    from fedalign.data import images

    shards = {"shards": 2, "shard_size": 120} if partition == "shards" else {}
    folder = {"folder": "emnist47-redrawn"} if data == "emnist" else {}
    kind = getattr(images, DATA[data][0])
    return kind(clients=20, priority=4, samples=240, partition=partition, **shards, **folder).federation(seed)


def stack(job: tuple[str, str, int, list[tuple[str, str, float]], str]) -> list[dict]:
    """Run some cells (rule, attack, fraction) of one federation and seed together."""
    import torch

    import fedalign as fa
    from fedalign.simulation.api import simulate_many
    from fedalign.training.models import logistic

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data, partition, seed, cells, device = job
    fed, local = federation(data, partition, seed), fa.LocalSGD(lr=0.1, epochs=5, batch_size=50)
    rules = {"priority": fa.PriorityOnly(), "auto": fa.AutoAlign(), VERIFIED: fa.Verified()}
    specs = [
        fa.RunSpec(
            fed,
            rules[rule],
            40,
            local=local,
            seed=seed,
            adversary=fa.Adversary(fraction=part, **ATTACKS[attack]) if attack in ATTACKS else None,
        )
        for rule, attack, part in cells
    ]
    results = simulate_many(specs, lambda: logistic(*DATA[data][1:]), device=device)
    named = {"federation": f"{data}-{partition}", "seed": seed}
    found = []
    for (rule, attack, part), result in zip(cells, results, strict=True):
        accuracy, success = (result.history.final(name) for name in ("test_accuracy", "attack_success"))
        cell = {"rule": rule, "attack": attack, "fraction": part, "accuracy": 100 * accuracy, "success": success}
        found.append({**named, **cell})
    return found


def jobs(only: list[str], seeds: int, device: str) -> list[tuple]:
    """List the stacks: small ones, so that all processes have work."""
    quiet = [(rule, "none", 0.0) for rule in ("priority", "auto", VERIFIED)]
    cells = quiet + [(VERIFIED, attack, part) for attack, part in product(ATTACKS, FRACTIONS)]
    found = []
    for seed, data, partition in product(range(seeds), DATA, PARTITIONS):
        if not only or f"{data}-{partition}" in only:
            found += [(data, partition, seed, cells[i : i + 13], device) for i in range(0, len(cells), 13)]
    return found


def table(rows: list[dict]) -> None:
    """Print one line a federation: points above ``priority``, the mean over seeds and the worst seed."""
    value = {(r["federation"], r["rule"], r["attack"], r["fraction"], r["seed"]): r["accuracy"] for r in rows}
    for name in dict.fromkeys(r["federation"] for r in rows):
        seeds = sorted({r["seed"] for r in rows if r["federation"] == name})

        def gains(rule: str, attack: str, part: float, name: str = name, seeds: list[int] = seeds) -> list[float]:
            alone = {s: value[name, "priority", "none", 0.0, s] for s in seeds}
            return [value[name, rule, attack, part, s] - alone[s] for s in seeds]

        def shown(found: list[float]) -> str:
            return f"{statistics.mean(found):+.1f} [{min(found):+.1f}]"

        line = f"{name}: auto {shown(gains('auto', 'none', 0.0))}, verified {shown(gains(VERIFIED, 'none', 0.0))}"
        for part in FRACTIONS:
            every = {attack: gains(VERIFIED, attack, part) for attack in ATTACKS if attack != "zero"}
            worst = min(every, key=lambda attack: statistics.mean(every[attack]))
            seed = min(min(found) for found in every.values())
            honest = statistics.mean(gains(VERIFIED, "zero", part))
            line += f"; {part:.0%}: {statistics.mean(every[worst]):+.1f} [{seed:+.1f}] ({worst}) of {honest:+.1f}"
        print(line)
        for part in FRACTIONS:
            for attack in ("backdoor", "backdoor, crafted"):
                found = [100 * r["success"] for r in rows
                         if (r["federation"], r["attack"], r["fraction"]) == (name, attack, part)]  # fmt: skip
                print(f"  {attack} at {part:.0%}: success {statistics.mean(found):.0f} % (at most {max(found):.0f} %)")


def main() -> None:
    """Run all stacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="federations, such as fmnist-iid,cifar10-shards")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file for all results, a line each")
    options = parser.parse_args()
    waiting = jobs([name for name in options.only.split(",") if name], options.seeds, options.device)
    rows: list[dict] = []
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for i, done in enumerate(pool.imap_unordered(stack, waiting), 1):
            rows += done
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in done)
            print(f"{i} of {len(waiting)} stacks", file=sys.stderr)
    table(sorted(rows, key=lambda row: row["federation"]))


if __name__ == "__main__":
    main()
