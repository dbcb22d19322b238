"""Robust aggregators and the verified rule in ByzFL's setting, on Fashion-MNIST.

Ten honest clients and one to four Byzantine ones, the worst of sign flips, optimal IPM and optimal ALIE, from equal to
very different data: the heat map of ByzFL's README. Four of the honest clients are priority clients. The aggregators
are told the number of Byzantine clients; the verified rule is not. IPM and ALIE are made against each aggregator; the
verified rule faces all of these.

    python benchmarks/byzantine.py [--byzantine 1,2,3,4] [--seeds 1] [--rounds 40] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import fedalign as fa
from fedalign.data.images import FashionMnist
from fedalign.registry import AGGREGATORS
from fedalign.training.models import logistic

PRIORITY, HONEST = 4, 10
SPREADS = {"equal": None, "Dirichlet(1)": 1.0, "Dirichlet(0.3)": 0.3, "Dirichlet(0.1)": 0.1}
AGGREGATOR_NAMES = ("mean", "median", "trimmed-mean", "geometric-median", "multi-krum", "nnm")
VERIFIED = "fedalign-verified"


def aggregator(name: str, hostile: int) -> str:
    """Name an aggregator with the number of hostile clients, where it takes one."""
    options = {"trimmed-mean": f"(trim={hostile})", "multi-krum": f"(f={hostile})", "nnm": f"(f={hostile})"}
    return name + options.get(name, "")


def attacks(against: str) -> list[str]:
    """List ByzFL's attacks, the last two with the factor that harms an aggregator most."""
    return ["sign-flip", f'ipm(against="{against}")', f'alie(against="{against}")']


def federation(spread: float | None, hostile: int, seed: int) -> fa.Federation:
    """Split Fashion-MNIST among ten honest clients and some hostile ones."""
    kind = {"partition": "iid"} if spread is None else {"partition": "dirichlet", "alpha": spread}
    return FashionMnist(clients=HONEST + hostile, priority=PRIORITY, samples=240, **kind).federation(seed)


def specs(spread: float | None, hostile: int, seed: int, rounds: int) -> dict[tuple[str, str], fa.RunSpec]:
    """Describe all runs of one cell, by rule and attack."""
    fed = federation(spread, hostile, seed)
    names = [client.name for client in fed.clients[-hostile:]]
    local = fa.LocalSGD(lr=0.1, epochs=5, batch_size=50)
    found = {("priority", "none"): fa.RunSpec(fed, fa.PriorityOnly(), rounds, local=local, seed=seed)}
    mean = AGGREGATORS.accept("aggregator", "mean")
    for name in AGGREGATOR_NAMES:
        used = aggregator(name, hostile)
        made = AGGREGATORS.accept("aggregator", used)
        for attack in attacks(used):
            adversary = fa.Adversary(attack, clients=names)
            found[name, attack] = fa.RunSpec(
                fed, fa.Everyone(), rounds, local=local, seed=seed, aggregator=made, adversary=adversary
            )
            if (VERIFIED, attack) not in found:  # it faces what is made against any of the aggregators
                found[VERIFIED, attack] = fa.RunSpec(
                    fed, fa.Verified(), rounds, local=local, seed=seed, aggregator=mean, adversary=adversary
                )
    return found


def main() -> None:
    """Run all cells and print the worst accuracy over the attacks, in points."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--byzantine", default="1,2,3,4", help="numbers of Byzantine clients")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    print("| data | Byzantine | priority |", " | ".join((*AGGREGATOR_NAMES, VERIFIED)), "|")
    print("|---" * (len(AGGREGATOR_NAMES) + 4) + "|")
    for label, spread in SPREADS.items():
        for hostile in (int(number) for number in given.byzantine.split(",")):
            began = time.monotonic()
            worst: dict[str, list[float]] = {}
            for seed in range(given.seeds):
                described = specs(spread, hostile, seed, given.rounds)
                results = fa.simulate_many(list(described.values()), lambda: logistic(784, 10), device="cpu")
                lowest: dict[str, float] = {}
                for (name, _), result in zip(described, results, strict=True):
                    accuracy = 0.0 if result.error else 100 * (result.history.final("test_accuracy") or 0.0)
                    lowest[name] = min(lowest.get(name, 100.0), accuracy)
                for name, accuracy in lowest.items():
                    worst.setdefault(name, []).append(accuracy)
            means = {name: sum(values) / len(values) for name, values in worst.items()}
            rows.append({"data": label, "byzantine": hostile, "seconds": time.monotonic() - began, **means})
            shown = " | ".join(f"{means[name]:.1f}" for name in ("priority", *AGGREGATOR_NAMES, VERIFIED))
            print(f"| {label} | {hostile} of {HONEST + hostile} | {shown} |", flush=True)
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
