"""What the GPU tests share: the devices they run on, federations, models and local work.

The tests need PyTorch, NumPy and pytest alone (those of whole runs also what ``fedalign run`` needs), so that they run
on a machine where nothing else is installed: ``PYTHONPATH=src python -m pytest --confcutdir=tests/gpu tests/gpu``.
Some also run on the CPU, to test themselves: both sides of the comparison are then the plain version.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fedalign as fa
from fedalign.simulation.engine.batched import BatchedEngine
from fedalign.simulation.engine.jobs import Data, TrainJob
from fedalign.simulation.engine.reference import ReferenceEngine
from fedalign.training import models

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and PyTorch finds none here")
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


@pytest.fixture(autouse=True)
def full_precision():
    """Compute products in float32, not TF32, whatever was set before."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def federation(shape, classes, sizes=(1, 7, 50, 51, 20, 33, 64, 9, 20, 50)):
    """Clients of unlike sizes, so that batches are padded and some clients finish early."""
    draw = np.random.default_rng(1)
    train = [(draw.normal(size=(n, *shape)).astype(np.float32), draw.integers(0, classes, n)) for n in sizes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fa.Federation.from_arrays(train, priority=[k < 2 for k in range(len(sizes))], heldout_fraction=0.0)


def dropout_mlp():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 4))


def normalised_mlp():
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def dropout_cnn():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.MaxPool2d(2),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(96, 16),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(16, 4),
    )


class Transformer(nn.Module):
    """An encoder with PyTorch's default dropout of 0.1."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(3, 8), nn.Linear(8, 4)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x):
        return self.out(self.encoder(self.embed(x.reshape(len(x), 4, 3))).mean(1))


#: Each model with the shape of its samples; all have four classes.
MODELS = {
    "logistic": (lambda: models.logistic(12, 4), (12,)),
    "mlp": (lambda: models.mlp(12, [16, 8], 4), (12,)),
    "normalised mlp": (normalised_mlp, (12,)),
    "dropout mlp": (dropout_mlp, (12,)),
    "cnn": (small_cnn, (3, 10, 10)),
    "dropout cnn": (dropout_cnn, (3, 10, 10)),
    "transformer": (Transformer, (12,)),
}

# A gradient of rounding noise divided by its own size is a full step of Adam, so eps is well above the noise.
LOCALS = {
    "sgd": fa.LocalSGD(lr=0.05, epochs=2, batch_size=20),
    "momentum": fa.LocalSGD(lr=0.02, epochs=2, batch_size=20, momentum=0.7, clip=1.0, mu=0.1, weight_decay=0.01),
    "full batch": fa.LocalSGD(lr=0.05, epochs=2, batch_size=None),
    "step rates": fa.LocalSGD(lr=fa.InverseTime(mu=1.0, gamma=40.0), epochs=2, batch_size=20),
    "adam": fa.LocalAdam(lr=0.005, epochs=2, batch_size=20, eps=1e-3),
    "adamw": fa.LocalAdamW(lr=0.005, epochs=2, batch_size=20, eps=1e-3, weight_decay=0.1),
}


def engines(make, shape, device, **options):
    """Give a federation, a start, the reference engine on the CPU and the batched engine on a device."""
    fed = federation(shape, 4)
    torch.manual_seed(0)
    template = make()
    reference = ReferenceEngine(template, fa.cross_entropy, Data([fed.pool], torch.device("cpu"), torch.float32))
    data = Data([fed.pool], torch.device(device), torch.float32)
    batched = BatchedEngine(template, fa.cross_entropy, data, **options)
    return fed, reference.layout.flatten(template), reference, batched


def jobs_for(fed, start, local, round=0):
    return [TrainJob(start, fed.pool, c.train, local, 0, round, 10, k) for k, c in enumerate(fed.clients)]


def trained(engine, jobs):
    """Train and give the models in the jobs' order, on the CPU."""
    found = {one.job: one.model.cpu() for one in engine.train(jobs)}
    return torch.stack([found[j] for j in range(len(jobs))])
