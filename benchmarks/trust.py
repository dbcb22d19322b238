"""The verified rule against hostile free clients on nine federations, in several processes.

Fashion-MNIST, EMNIST-47 and CIFAR-10, each IID, Dirichlet(0.5) and in shards of two classes: 4 priority and 16 free
clients of 240 samples, a logistic model, 40 rounds. Prints, for each federation and rule, the gain over ``priority``
without attack, and the worst case over the attacks beside the gain of the honest clients alone (the attack ``zero``).
``--random 9`` adds nine attacks to each federation and seed that are combined at random, from the attacks that can be,
with random reports, sample counts and rounds. ``--rules`` also takes an aggregator without a defence, as
``all+median``; it is told the number of hostile clients. With ``--out`` an interrupted benchmark continues where it
stopped.

    python benchmarks/trust.py [--only fmnist-iid,…] [--attacks sign-flip,…] [--random 9] [--fractions 0.25,…]
                               [--rules fedalign-verified,all+median,…] [--seeds 5] [--first 0] [--set within=4.0]
                               [--device cuda] [--workers 13] [--out FILE.jsonl]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
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
TOLD = {"trimmed-mean": "trim", "krum": "f", "multi-krum": "f", "nnm": "f"}  # aggregators that take their number
#: What a random attack is made of: what is done to the data, to the updates, and when.
POISON = (None, None, "label-flip", "label-flip", "irrelevant")
SENT = (
    *(f"sign-flip(scale={scale})" for scale in (0.3, 1.0, 3.0, 9.9)),
    *(f"scaling(factor={factor})" for factor in (0.5, 2.0, 9.9)),
    *(f"gaussian(scale={scale})" for scale in (1.0, 3.0)),
    *("copied", "mimic(client=0)", "mimic(client=3)", "min-max", "min-sum", "disguise"),
    *(f"alie(factor={factor})" for factor in (1.0, 1.5, 3.0)),
    *(f"ipm(factor={factor})" for factor in (0.5, 2.0, 5.0)),
    *(f"blend(honest={part})" for part in (0.3, 0.5, 0.8)),
    *(f"at-cosine(cosine={cosine}, length={length})" for cosine in (-0.05, 0.01, 0.3, 0.6) for length in (1.0, 5.0)),
    *(f"harmful-direction(cosine={cosine})" for cosine in (-0.05, 0.1, 0.3)),
)
WHEN = ({}, {}, {"start": 0.25}, {"start": 0.75}, {"last": 1}, {"last": 3}, {"last": 10}, {"period": 1}, {"period": 5})
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


def table_of(attack: str, name: str, seed: int) -> dict:
    """Return an attack's table: of the catalogue, or combined at random for a federation and seed."""
    from fedalign.attacks.catalogue import CATALOGUE

    if attack in CATALOGUE:
        return CATALOGUE[attack]
    draw = random.Random(f"{attack} {name} {seed}")
    poison = draw.choice(POISON)
    count = draw.choice((0, 1, 1, 2) if poison else (1, 1, 2))
    return {
        "kind": [*([poison] if poison else []), *draw.sample(SENT, count)],
        "report": draw.choice(("aligned", "aligned", "truthful", "high", "low")),
        "samples": draw.choice((1.0, 1.0, 10.0)),
        **draw.choice(WHEN),
    }


def contender(rule: str, hostile: int, settings: dict) -> dict:
    """Return the rule, and the aggregator if it names one, as arguments of a run."""
    import fedalign as fa
    from fedalign.registry import AGGREGATORS

    made = {"priority": fa.PriorityOnly, "auto": fa.AutoAlign, "all": fa.Everyone}
    name, _, aggregator = rule.partition("+")
    found = {"rule": fa.Verified(**settings) if name == VERIFIED else made[name]()}
    if aggregator:
        told = {TOLD[aggregator]: hostile} if aggregator in TOLD else {}
        found["aggregator"] = AGGREGATORS.accept("aggregator", {"kind": aggregator, **told})
    return found


def stack(job: tuple[str, str, int, list[Cell], dict, str]) -> list[dict]:
    """Run some cells of one federation and seed together."""
    import torch

    import fedalign as fa
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
    name = f"{data}-{partition}"
    tables = [table_of(attack, name, seed) if part else {} for _, attack, part in cells]
    specs = [
        fa.RunSpec(
            fed,
            **contender(rule, round(part * 16), settings),
            rounds=40,
            local=local,
            seed=seed,
            adversary=make_adversary(resolve_adversary({**table, "fraction": part})) if part else None,
            measure_every=100,  # the final figure is the mean of the last ten rounds
        )
        for (rule, _, part), table in zip(cells, tables, strict=True)
    ]
    results = simulate_many(specs, lambda: logistic(*DATA[data][1:]), device=device)
    found = []
    for (rule, attack, part), table, result in zip(cells, tables, results, strict=True):
        lost = result.error is not None  # the run diverged: its model is worth nothing
        curve = [0.0] * 10 if lost else [100 * one for one in result.history.values("test_accuracy")[-10:]]
        cell = {"federation": name, "seed": seed, "rule": rule, "attack": attack, "fraction": part}
        success = None if lost else result.history.final("attack_success")
        cost = {"seconds": (time.perf_counter() - began) / len(cells), "table": table}
        found.append({**cell, "accuracy": statistics.mean(curve), "curve": curve, "success": success, **cost})
    return found


def jobs(options: argparse.Namespace, done: set[tuple]) -> list[tuple]:
    """List the stacks: small ones, so that all processes have work, and all of one seed before the next."""
    fractions = [float(part) for part in options.fractions.split(",")]
    rules = options.rules.split(",")
    quiet = [(rule, "none", 0.0) for rule in dict.fromkeys(("priority", "auto", *rules))]
    drawn = [f"random-{i}" for i in range(options.random)]
    wanted = dict.fromkeys([HONEST, *(attack for attack in options.attacks.split(",") if attack), *drawn])
    cells = quiet + [(rule, attack, part) for rule, attack, part in product(rules, wanted, fractions)]
    cells.sort(key=lambda cell: "backdoor" in cell[1])
    found = []
    for seed, data, partition in product(range(options.first, options.first + options.seeds), DATA, PARTITIONS):
        name = f"{data}-{partition}"
        if options.only and name not in options.only.split(","):
            continue
        left = [cell for cell in cells if (name, seed, *cell) not in done]
        settings = {key: json.loads(value) for key, _, value in (one.partition("=") for one in options.set)}
        found += [(data, partition, seed, left[i : i + 8], settings, options.device) for i in range(0, len(left), 8)]
    return found


def table(rows: list[dict]) -> None:
    """Print one line a federation: points above ``priority``, the mean over seeds and the worst seed."""
    value = {(r["federation"], r["rule"], r["attack"], r["fraction"], r["seed"]): r for r in rows}

    def gain(row: dict, without: dict) -> float:
        last = min(10, row["table"].get("last") or 10)  # a strike in the last rounds is judged by these
        return statistics.mean(row["curve"][-last:]) - statistics.mean(without["curve"][-last:])

    def shown(found: list[float]) -> str:
        return f"{statistics.mean(found):+.1f} [{min(found):+.1f}]"

    for name, rule in dict.fromkeys((r["federation"], r["rule"]) for r in rows):
        if rule in ("priority", "auto"):
            continue
        alone = {seed: value[key] for key in value for seed in [key[4]] if key[:4] == (name, "priority", "none", 0.0)}

        def gains(rule: str, attack: str, part: float, name: str = name, alone: dict = alone) -> list[float]:
            return [gain(value[key], alone[s]) for s in alone if (key := (name, rule, attack, part, s)) in value]

        line = f"{name}: priority {statistics.mean(row['accuracy'] for row in alone.values()):.1f}, "
        line += f"auto {shown(gains('auto', 'none', 0.0))}, "
        line += f"{rule} {shown(gains(rule, 'none', 0.0))}"
        mine = [r for r in rows if (r["federation"], r["rule"]) == (name, rule) and r["fraction"]]
        cells = {(r["attack"], r["fraction"]) for r in mine}
        for part in sorted({part for _, part in cells}):
            every = {attack: gains(rule, attack, part) for attack, of in cells if of == part and attack != HONEST}
            every = {attack: found for attack, found in every.items() if found}
            if not every:
                continue
            worst = min(every, key=lambda attack: statistics.mean(every[attack]))
            seed = min(min(found) for found in every.values())
            honest = statistics.mean(gains(rule, HONEST, part))
            line += f"; {part:.0%}: {statistics.mean(every[worst]):+.1f} [{seed:+.1f}] ({worst}) of {honest:+.1f}"
        print(line)
        for attack, part in sorted(cell for cell in cells if "backdoor" in cell[0]):
            found = [100 * r["success"] for r in mine if (r["attack"], r["fraction"]) == (attack, part)]
            print(f"  {attack} at {part:.0%}: success {statistics.mean(found):.0f} % (at most {max(found):.0f} %)")


def main() -> None:
    """Run all stacks, and print the table."""
    from fedalign.attacks.catalogue import CATALOGUE

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="federations, such as fmnist-iid,cifar10-shards")
    parser.add_argument("--attacks", default=",".join(CATALOGUE), help="names of fedalign redteam; default: all")
    parser.add_argument("--random", type=int, default=0, help="attacks combined at random, each federation has its own")
    parser.add_argument("--fractions", default="0.25,0.5,0.75", help="of the free clients that are hostile")
    parser.add_argument("--rules", default=VERIFIED, help="fedalign-verified, all, all+median and other aggregators")
    parser.add_argument("--set", action="append", default=[], help="an option of the rule, such as calibrated=false")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
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
