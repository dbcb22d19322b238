"""The three models of the paper on a GPU: seconds a round, and how far results are from the CPU's reference loop.

    python benchmarks/gpu.py [--tf32] [--check]

60 clients, 5 epochs, batch 50: logistic 784×10 with 1,000 samples a client, 784-200-200-47 with 1,800, the paper's CNN
with 800. `--check` also trains a few clients with the reference engine on the CPU in float32 and compares weights, and
runs 30 rounds of FedALIGN on both devices and compares decisions.
"""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np
import torch
from torch import nn

import fedalign as fa
from fedalign.simulation.engine.batched import BatchedEngine
from fedalign.simulation.engine.jobs import Data, TrainJob
from fedalign.simulation.engine.reference import ReferenceEngine
from fedalign.training import models

CASES = {
    "logistic": (lambda: models.logistic(784, 10), (784,), 10, 1000, 0.1),
    "network": (lambda: models.mlp(784, [200, 200], 47), (784,), 47, 1800, 0.1),
    "cnn": (models.cnn, (3, 32, 32), 10, 800, 0.01),
}


def jobs_for(fed: fa.Federation, start: torch.Tensor, local: fa.LocalSGD, clients: int, round: int) -> list[TrainJob]:
    return [TrainJob(start, fed.pool, c.train, local, 0, round, 100, k) for k, c in enumerate(fed.clients[:clients])]


def case(name: str, check: bool) -> str:
    make, shape, classes, samples, lr = CASES[name]
    draw = np.random.default_rng(0)
    train = [
        (draw.integers(0, 256, (samples, *shape), dtype=np.uint8), draw.integers(0, classes, samples))
        for _ in range(60)
    ]
    fed = fa.Federation.from_arrays(train, priority=[k < 2 for k in range(60)], heldout_fraction=0.0)
    torch.manual_seed(0)
    template = make()
    local = fa.LocalSGD(lr=lr, epochs=5, batch_size=50)
    engine = BatchedEngine(template, fa.cross_entropy, Data([fed.pool], torch.device("cuda"), torch.float32))
    start = engine.layout.flatten(template).cuda()
    seconds = []
    for round in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in engine.train(jobs_for(fed, start, local, 60, round)):
            pass
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    steady = 1e3 * float(np.median(seconds[2:]))
    text = f"{name}: first {seconds[0]:.3f} s, then {steady:.2f} ms a round (best {1e3 * min(seconds):.2f})"
    if check:
        reference = ReferenceEngine(template, fa.cross_entropy, Data([fed.pool], torch.device("cpu"), torch.float32))
        one_epoch = fa.LocalSGD(lr=0.01, epochs=1, batch_size=50)
        slow = list(reference.train(jobs_for(fed, start.cpu(), one_epoch, 3, 0)))
        fast = list(engine.train(jobs_for(fed, start, one_epoch, 3, 0)))
        moved = max((a.model - start.cpu()).norm().item() for a in slow)
        apart = max((a.model - b.model.cpu()).norm().item() for a, b in zip(slow, fast, strict=True))
        text += f"; {apart / moved:.1e} of the movement away from the CPU's reference"
    return text


def decisions() -> str:
    from fedalign.data.synth import Synth

    fed = Synth(label_skew=0.5, random_skew=0.5).federation(0)
    words = []
    for device, engine in (("cpu", "reference"), ("cuda", "batched")):
        # A rate at which the task is stable: at 0.1 it amplifies the last bit to another model within ten rounds.
        local = fa.LocalSGD(lr=0.005, epochs=5, batch_size=50)
        result = fa.simulate(
            fed, lambda: models.logistic(60, 10), fa.Align(0.2), 30, 0.1, local, device=device, engine=engine
        )
        words.append([[c.decision for c in r.clients] for r in result.history.rounds])
    same = sum(a == b for a, b in zip(*words, strict=True))
    kinds = sorted({word for rows in words[0] for word in rows})
    return f"30 rounds of FedALIGN: decisions the same in {same} of 30 rounds ({', '.join(kinds)})"


def variants() -> str:
    """Compare every kind of local work on ragged clients with the CPU's reference."""
    draw = np.random.default_rng(1)
    sizes = (1, 7, 50, 51, 120, 33, 64, 9, 200, 50)
    train = [(draw.normal(size=(n, 12)).astype(np.float32), draw.integers(0, 4, n)) for n in sizes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fed = fa.Federation.from_arrays(train, priority=[k < 2 for k in range(10)])
    worst = {}
    for kind, make in (
        ("chain", lambda: models.mlp(12, [16], 4)),
        ("batchnorm", lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))),
    ):
        for options in ({}, {"momentum": 0.7}, {"mu": 0.5}, {"clip": 0.2, "weight_decay": 0.01}, {"batch_size": None}):
            for lr in (0.05, fa.InverseTime(mu=1.0, gamma=40.0)):
                local = fa.LocalSGD(**{"lr": lr, "epochs": 2, "batch_size": 20, **options})
                both = [
                    fa.simulate(fed, make, fa.Everyone(), 3, 0, local, device=d, engine=e).model.state_dict()
                    for d, e in (("cpu", "reference"), ("cuda", "batched"))
                ]
                apart = max(float((both[0][k].float() - both[1][k].float()).abs().max()) for k in both[0])
                worst[kind] = max(worst.get(kind, 0.0), apart)
    return "largest difference of a weight after 3 rounds: " + ", ".join(f"{k} {v:.1e}" for k, v in worst.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = options.tf32
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "TF32" if options.tf32 else "float32", flush=True)
    for name in options.cases:
        print(case(name, options.check), flush=True)
    if options.check:
        print(decisions(), flush=True)
        print(variants(), flush=True)


if __name__ == "__main__":
    main()
