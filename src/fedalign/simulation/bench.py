"""Compares the speed of the batched engine and the reference engine on this machine, in seconds per round.

Each model case is one round of FedAvg on all clients: 60 clients, 5 epochs, batch size 50 (fewer clients and samples
for the CNN). The engines take turns, and the best repeat of each counts, since noise only adds time. The synth case
runs all arms and 5 seeds of `synth-medium`: together in the batched engine, one by one in the reference engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fedalign as fa
from fedalign.errors import FedalignError, nearest
from fedalign.experiments.config import load
from fedalign.simulation.engine.batched import BatchedEngine
from fedalign.simulation.engine.jobs import Data, TrainJob
from fedalign.simulation.engine.reference import ReferenceEngine
from fedalign.training import models

#: The batched engine should be at least this many times faster than the reference engine, on 2 cores.
GOALS = {"logistic": 3.0, "network": 2.0, "cnn": 1.0, "synth-medium": 5.0}
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int, int]] = {
    # model, sample shape, classes, clients, samples per client
    "logistic": (lambda: models.logistic(784, 10), (784,), 10, 60, 1000),
    "network": (lambda: models.mlp(784, [200, 200], 47), (784,), 47, 60, 1000),
    "cnn": (models.cnn, (3, 32, 32), 10, 6, 200),
}


def best_of(repeats: int, *works: Callable[[], object]) -> list[float]:
    """Time several functions in turns, ``repeats`` times each after a warm-up call; return the best seconds of each."""
    seconds: list[list[float]] = [[] for _ in works]
    for work in works:
        work()  # warm-up
    for _ in range(repeats):
        for place, work in enumerate(works):
            began = time.perf_counter()
            work()
            seconds[place].append(time.perf_counter() - began)
    return [min(s) for s in seconds]


def model_case(name: str, repeats: int) -> tuple[float, float]:
    """Return the seconds of one round of a model in the reference engine and in the batched engine."""
    make, shape, classes, clients, samples = MODELS[name]
    draw = np.random.default_rng(0)
    train = [
        (draw.normal(size=(samples, *shape)).astype(np.float32), draw.integers(0, classes, samples))
        for _ in range(clients)
    ]
    fed = fa.Federation.from_arrays(train, priority=[k < 2 for k in range(clients)], heldout_fraction=0.0)
    template = make()
    data = Data([fed.pool], torch.device("cpu"), torch.float32)
    local = fa.LocalSGD(lr=0.01, epochs=5, batch_size=50)
    plain, fast = ReferenceEngine(template, fa.cross_entropy, data), BatchedEngine(template, fa.cross_entropy, data)
    start = plain.layout.flatten(template)
    jobs = [TrainJob(start, fed.pool, c.train, local, 0, 0, 1, k) for k, c in enumerate(fed.clients)]
    reference, batched = best_of(repeats, lambda: list(plain.train(jobs)), lambda: list(fast.train(jobs)))
    return reference, batched


def synth_case(rounds: int, repeats: int) -> tuple[float, float]:
    """Return the seconds per round of ``synth-medium``, all arms and seeds, in the reference and the batched engine."""
    # The fraction of warm-up rounds, and so the work of admitted clients, is that of the full experiment.
    experiment = load("synth-medium", {"rounds": rounds})
    specs = [spec for _, _, spec in experiment.specs()]

    def one_by_one() -> None:
        for spec in specs:
            fa.simulate_many([spec], experiment.model, device="cpu", engine="reference")

    reference, batched = best_of(repeats, one_by_one, lambda: fa.simulate_many(specs, experiment.model, device="cpu"))
    return reference / rounds, batched / rounds


def run(cases: Sequence[str], repeats: int = 3, synth_rounds: int = 10) -> None:
    """Measure the named cases (default: all) and print a table; an unknown name raises :class:`FedalignError`."""
    for name in cases:
        if name not in GOALS:
            raise FedalignError(f"unknown case {name!r}; {nearest(name, GOALS)}")
    table = Table(title=f"seconds per round, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for heading in ("case", "reference", "batched", "ratio", "goal"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    console = Console(highlight=False)
    for name in cases or GOALS:
        with console.status(name):
            reference, batched = synth_case(synth_rounds, 1) if name == "synth-medium" else model_case(name, repeats)
        ratio = reference / batched
        table.add_row(name, f"{reference:.3f}", f"{batched:.3f}", f"{ratio:.1f}×", f"{GOALS[name]:g}×")
        console.print(f"{name}: {ratio:.1f}×")
    console.print(table)
