"""Where a CPU round goes: its rate against a large matrix product's, and the operators that take the time.

python benchmarks/where.py     # 60 clients, 5 epochs, batch 50
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

import fedalign as fa
from fedalign.simulation.engine.batched import BatchedEngine
from fedalign.simulation.engine.jobs import Data, TrainJob
from fedalign.training import models

CASES = {  # hidden widths, classes, samples a client
    "logistic": ([], 10, 1000),
    "network": ([200, 200], 47, 600),
}
CLIENTS, EPOCHS, BATCH = 60, 5, 50


def large_product_rate() -> float:
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - began)
    return 2 * 2048**3 / best


def case(name: str) -> None:
    hidden, classes, samples = CASES[name]
    draw = np.random.default_rng(0)
    train = [
        (draw.normal(size=(samples, 784)).astype(np.float32), draw.integers(0, classes, samples))
        for _ in range(CLIENTS)
    ]
    fed = fa.Federation.from_arrays(train, priority=[k < 2 for k in range(CLIENTS)], heldout_fraction=0.0)
    template = models.mlp(784, hidden, classes)
    engine = BatchedEngine(template, fa.cross_entropy, Data([fed.pool], torch.device("cpu"), torch.float32))
    local = fa.LocalSGD(lr=0.01, epochs=EPOCHS, batch_size=BATCH)
    start = engine.layout.flatten(template)
    jobs = [TrainJob(start, fed.pool, c.train, local, 0, 0, 1, k) for k, c in enumerate(fed.clients)]
    list(engine.train(jobs))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        list(engine.train(jobs))
        seconds.append(time.perf_counter() - began)
    widths = [784, *hidden, classes]
    products = [a * b for a, b in itertools.pairwise(widths)]
    # Forward and weight gradient for every layer, the gradient of the input for all but the first.
    flop = 2 * (3 * sum(products) - products[0]) * samples * CLIENTS * EPOCHS
    rate, ceiling = flop / min(seconds), large_product_rate()
    print(
        f"{name}: {min(seconds):.3f} s a round, {flop / 1e9:.1f} GFLOP, {rate / 1e9:.0f} GFLOP/s, "
        f"{100 * rate / ceiling:.0f} % of a large product's {ceiling / 1e9:.0f}"
    )
    with profile(activities=[ProfilerActivity.CPU]) as found:
        list(engine.train(jobs))
    events = sorted(found.key_averages(), key=lambda e: -e.self_cpu_time_total)
    total = sum(e.self_cpu_time_total for e in events)
    print(
        "  "
        + ", ".join(f"{e.key.removeprefix('aten::')} {100 * e.self_cpu_time_total / total:.0f} %" for e in events[:6])
    )


if __name__ == "__main__":
    for name in CASES:
        case(name)
