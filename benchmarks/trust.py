"""The verified rule against hostile free clients on nine federations, in several processes.

Fashion-MNIST, EMNIST-47 and CIFAR-10, each IID, Dirichlet(0.5) and in shards of two classes: 4 priority and 16 free
clients of 240 samples, a logistic model, 40 rounds. Prints, for each federation, the gain over ``priority`` without
attack, and the worst case over the attacks beside the gain of the honest clients alone (the attack ``zero``). With
``--out`` an interrupted benchmark continues where it stopped.

    python benchmarks/trust.py [--only fmnist-iid,…] [--attacks sign-flip,…] [--fractions 0.25,…] [--seeds 5]
                               [--set within=4.0] [--device cuda] [--workers 13] [--out FILE.jsonl]
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

DATA = {"fmnist": ("FashionMnist", 784, 10), "emnist": ("Emnist", 784, 47), "cifar10": ("Cifar10", 3072, 10)}
PARTITIONS = ("iid", "dirichlet", "shards")
VERIFIED = "fedalign-verified"
HONEST = "zero"  # clients that send nothing: what is left is the gain of the others
Cell = tuple[str, str, float]  # rule, attack, fraction of the free clients that are hostile


def federation(data: str, partition: str, seed: int):
    """Split one of the data sets among 20 clients."""
    from fedalign.data import images

    shards = {"shards": 2, "shard_size": 120} if partition == "shards" else {}
    folder = {"folder": "emnist47-redrawn"} if data == "emnist" else {}
    kind = getattr(images, DATA[data][0])
    return kind(clients=20, priority=4, samples=240, partition=partition, **shards, **folder).federation(seed)


def normalised(fed):
    """Normalise all samples once instead of in every batch; the numbers are the same. Triggers need the raw pixels."""
    import torch

    pool, trailing = fed.pool, (1,) * (fed.pool.x.dim() - 2)
    mean, std = (torch.as_tensor(value, dtype=torch.float32).reshape(-1, *trailing) for value in (pool.mean, pool.std))
    fed.pool = replace(pool, x=(pool.x / 255 - mean) / std, mean=0.0, std=1.0)
    return fed


def stack(job: tuple[str, str, int, list[Cell], dict, str]) -> list[dict]:
    """Run some cells of one federation and seed together."""
    import torch

    import fedalign as fa
    from fedalign.attacks.catalogue import CATALOGUE
    from fedalign.attacks.settings import make_adversary, resolve_adversary
    from fedalign.simulation.api import simulate_many
    from fedalign.training.models import logistic

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data, partition, seed, cells, settings, device = job
    began = time.perf_counter()
    fed, local = federation(data, partition, seed), fa.LocalSGD(lr=0.1, epochs=5, batch_size=50)
    if not any("backdoor" in attack for _, attack, _ in cells):
        fed = normalised(fed)
    rules = {"priority": fa.PriorityOnly(), "auto": fa.AutoAlign(), VERIFIED: fa.Verified(**settings)}
    specs = [
        fa.RunSpec(
            fed,
            rules[rule],
            40,
            local=local,
            seed=seed,
            adversary=make_adversary(resolve_adversary({**CATALOGUE[attack], "fraction": part})) if part else None,
            measure_every=100,  # the final figure is the mean of the last ten rounds
        )
        for rule, attack, part in cells
    ]
    results = simulate_many(specs, lambda: logistic(*DATA[data][1:]), device=device)
    named = {"federation": f"{data}-{partition}", "seed": seed}
    found = []
    for (rule, attack, part), result in zip(cells, results, strict=True):
        accuracy, success = (result.history.final(name) for name in ("test_accuracy", "attack_success"))
        cell = {"rule": rule, "attack": attack, "fraction": part, "accuracy": 100 * accuracy, "success": success}
        found.append({**named, **cell, "seconds": (time.perf_counter() - began) / len(cells)})
    return found


def jobs(options: argparse.Namespace, done: set[tuple]) -> list[tuple]:
    """List the stacks: small ones, so that all processes have work, and all of one seed before the next."""
    fractions = [float(part) for part in options.fractions.split(",")]
    quiet = [(rule, "none", 0.0) for rule in ("priority", "auto", VERIFIED)]
    wanted = dict.fromkeys([HONEST, *options.attacks.split(",")])
    cells = quiet + [(VERIFIED, attack, part) for attack, part in product(wanted, fractions)]
    cells.sort(key=lambda cell: "backdoor" in cell[1])
    found = []
    for seed, data, partition in product(range(options.seeds), DATA, PARTITIONS):
        name = f"{data}-{partition}"
        if options.only and name not in options.only.split(","):
            continue
        left = [cell for cell in cells if (name, seed, *cell) not in done]
        settings = {key: json.loads(value) for key, _, value in (one.partition("=") for one in options.set)}
        found += [(data, partition, seed, left[i : i + 8], settings, options.device) for i in range(0, len(left), 8)]
    return found


def table(rows: list[dict]) -> None:
    """Print one line a federation: points above ``priority``, the mean over seeds and the worst seed."""
    value = {(r["federation"], r["rule"], r["attack"], r["fraction"], r["seed"]): r["accuracy"] for r in rows}

    def shown(found: list[float]) -> str:
        return f"{statistics.mean(found):+.1f} [{min(found):+.1f}]"

    for name in dict.fromkeys(r["federation"] for r in rows):
        alone = {seed: value[key] for key in value for seed in [key[4]] if key[:4] == (name, "priority", "none", 0.0)}

        def gains(rule: str, attack: str, part: float, name: str = name, alone: dict = alone) -> list[float]:
            return [value[key] - alone[s] for s in alone if (key := (name, rule, attack, part, s)) in value]

        line = f"{name}: priority {statistics.mean(alone.values()):.1f}, auto {shown(gains('auto', 'none', 0.0))}, "
        line += f"verified {shown(gains(VERIFIED, 'none', 0.0))}"
        cells = {(r["attack"], r["fraction"]) for r in rows if r["federation"] == name and r["fraction"]}
        for part in sorted({part for _, part in cells}):
            every = {attack: gains(VERIFIED, attack, part) for attack, of in cells if of == part and attack != HONEST}
            every = {attack: found for attack, found in every.items() if found}
            worst = min(every, key=lambda attack: statistics.mean(every[attack]))
            seed = min(min(found) for found in every.values())
            honest = statistics.mean(gains(VERIFIED, HONEST, part))
            line += f"; {part:.0%}: {statistics.mean(every[worst]):+.1f} [{seed:+.1f}] ({worst}) of {honest:+.1f}"
        print(line)
        for attack, part in sorted(cell for cell in cells if "backdoor" in cell[0]):
            of = [r for r in rows if (r["federation"], r["attack"], r["fraction"]) == (name, attack, part)]
            found = [100 * r["success"] for r in of]
            print(f"  {attack} at {part:.0%}: success {statistics.mean(found):.0f} % (at most {max(found):.0f} %)")


def main() -> None:
    """Run all stacks, and print the table."""
    from fedalign.attacks.catalogue import CATALOGUE

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="federations, such as fmnist-iid,cifar10-shards")
    parser.add_argument("--attacks", default=",".join(CATALOGUE), help="names of fedalign redteam; default: all")
    parser.add_argument("--fractions", default="0.25,0.5,0.75", help="of the free clients that are hostile")
    parser.add_argument("--set", action="append", default=[], help="an option of the rule, such as calibrated=false")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file for all results, a line each; what it has is not run again")
    options = parser.parse_args()
    before = options.out.read_text(encoding="utf-8").splitlines() if options.out and options.out.exists() else []
    rows: list[dict] = [json.loads(line) for line in before]
    done = {(r["federation"], r["seed"], r["rule"], r["attack"], r["fraction"]) for r in rows}
    waiting = jobs(options, done)
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for i, new in enumerate(pool.imap_unordered(stack, waiting), 1):
            rows += new
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in new)
            print(f"{i} of {len(waiting)} stacks", file=sys.stderr)
    table(sorted(rows, key=lambda row: (row["federation"], row["seed"])))


if __name__ == "__main__":
    main()
