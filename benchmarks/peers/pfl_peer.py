"""pfl-research's federated averaging in its simulated backend."""

from __future__ import annotations

import itertools
from importlib.metadata import version

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch_models import accuracy, make
from workload import BATCH, EPOCHS, RATE, Clock, arguments, clients

case, rounds = arguments()
data = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in clients(case)]


class Task(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make(case)

    def forward(self, x):
        return self.inner(x)

    def loss(self, x, y, eval=False):
        self.train(not eval)
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y, eval=True):
        return {"loss": Weighted(0.0, len(y))}


class Tick(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        clock.tick()
        return False, Metrics()


order = itertools.cycle(range(len(data)))
datasets = [Dataset(list(pair), user_id=str(k)) for k, pair in enumerate(data)]
federated = FederatedDataset(lambda k: datasets[k], lambda: next(order))
task = Task()
model = PyTorchModel(task, torch.optim.SGD, torch.optim.SGD(task.parameters(), lr=1.0))
clock = Clock()
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=len(data), val_cohort_size=0
    ),
    SimulatedBackend(federated, federated),
    model,
    NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=EPOCHS, local_learning_rate=RATE),
    callbacks=[Tick()],
    send_metrics_to_platform=False,
)
clock.report("pfl-research", version("pfl"), accuracy(task, data))
