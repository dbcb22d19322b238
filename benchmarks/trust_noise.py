"""What noise on every aggregate does to backdoors that verified rounds do not stop, and what it costs.

CIFAR-10, IID: 4 priority and 16 free clients of 240 samples, a logistic model, 40 rounds, as in ``trust.py``. The noise
is Gaussian, and so many times as long as the aggregate's update. Prints, for each length, the gain over ``priority``
without attack, and gain and success of a plain backdoor of half the free clients and of a disguised one of a quarter.

    python benchmarks/trust_noise.py [--lengths 0,0.5,1,2] [--seed 0]
"""

from __future__ import annotations

import argparse
import warnings

import torch
from trust import DATA, federation

import fedalign as fa
from fedalign.aggregation.aggregator import AggregateContext, ContextAggregator
from fedalign.simulation.api import simulate_many
from fedalign.training.models import logistic

ATTACKS = {"none": (None, 0.0), "backdoor": ("backdoor", 0.5), "disguised": (["backdoor", "disguise"], 0.25)}


class Noisy(ContextAggregator):
    """The weighted mean, with noise ``length`` times as long as its update."""

    def __init__(self, length: float) -> None:
        self.length = length

    def combine_in(self, models: torch.Tensor, shares: torch.Tensor, context: AggregateContext) -> torch.Tensor:
        """Return the mean with noise on its trainable numbers, which the seed and the round fix."""
        mean = (models * shares[:, None]).sum(0)
        draw = torch.Generator().manual_seed(1000 * context.seed + context.round)
        noise = torch.randn(context.size, generator=draw)
        update = mean[: context.size] - context.received[: context.size]
        mean[: context.size] += self.length * update.norm() * noise / noise.norm()
        return mean


def main() -> None:
    """Run all cases together, and print a line for each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="0,0.5,1,2")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    fed, local = federation("cifar10", "iid", options.seed), fa.LocalSGD(lr=0.1, epochs=5, batch_size=50)
    common = {"rounds": 40, "local": local, "seed": options.seed, "measure_every": 100}
    lengths = [float(one) for one in options.lengths.split(",")]
    specs = [fa.RunSpec(fed, fa.PriorityOnly(), **common)]
    for length in lengths:
        aggregator = Noisy(length) if length else fa.WeightedMean()
        for kind, part in ATTACKS.values():
            hostile = fa.Adversary(kind, fraction=part) if kind else None
            specs.append(fa.RunSpec(fed, fa.Verified(), aggregator=aggregator, adversary=hostile, **common))
    alone, *results = simulate_many(specs, lambda: logistic(*DATA["cifar10"][1:]), device="cpu")
    print("| noise |", " | ".join(ATTACKS), "|")
    print("|---" * (1 + len(ATTACKS)) + "|")
    for i, length in enumerate(lengths):
        cells = []
        for result in results[i * len(ATTACKS) : (i + 1) * len(ATTACKS)]:
            gain, success = (
                100 * (result.history.final("test_accuracy") - alone.history.final("test_accuracy")),
                result.history.final("attack_success"),
            )
            cells.append(f"{gain:+.1f}" + ("" if success is None else f", success {100 * success:.0f} %"))
        print(f"| {length:g} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
