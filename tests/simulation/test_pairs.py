"""Two models on the same samples: both engines and made-up loops count alike, and the driver answers by client."""

import numpy as np
import pytest
import torch
from conftest import federation, linear
from torch import nn

import fedalign as fa
from fedalign.protocol.messages import Outcomes, Paired, Result
from fedalign.protocol.records import History
from fedalign.simulation.driver import Driver
from fedalign.simulation.engine.batched import BatchedEngine
from fedalign.simulation.engine.jobs import Data, EvalJob
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.engine.pairs import PairComparer, PairJob
from fedalign.simulation.engine.reference import ReferenceEngine
from fedalign.simulation.live_run import LiveRun


def normalised():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 4))


def pair(make, layout):
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made.append(layout.flatten(make()))
    return tuple(made)


def by_hand(make, layout, models, fed, k, split):
    rows = fed.clients[k].rows(split)
    right = []
    for model in models:
        module = make()
        layout.load(module, model)
        right.append((module.eval()(fed.pool.x[rows]).argmax(1) == fed.pool.y[rows]).numpy())
    return Outcomes(float((right[0] & ~right[1]).sum()), float((right[1] & ~right[0]).sum()), len(rows))


@pytest.mark.parametrize("make", [linear, normalised])
@pytest.mark.parametrize("engine", [BatchedEngine, ReferenceEngine])
def test_engines_count_as_a_loop_by_hand(make, engine, monkeypatch):
    feds = [federation(), federation(sizes=(30, 31, 20, 20, 20))]
    made = engine(make(), fa.cross_entropy, Data([f.pool for f in feds], torch.device("cpu"), torch.float32))
    monkeypatch.setattr(made.pairs, "_at_once", 7)
    models = pair(make, made.layout)
    jobs = [PairJob(models, f.pool, {k: f.clients[k].rows("test") for k in (0, 1, 3)}) for f in feds]
    jobs.insert(1, PairJob(models, feds[0].pool, {4: np.empty(0, np.int64)}))
    first, nothing, second = made.pairs.compare(jobs)
    assert nothing == {}
    for fed, found in ((feds[0], first), (feds[1], second)):
        assert found == {k: by_hand(make, made.layout, models, fed, k, "test") for k in (0, 1, 3)}
    assert any(o.gained and o.lost for o in first.values())


def test_the_difference_is_that_of_the_accuracies():
    fed = federation()
    engine = BatchedEngine(linear(), fa.cross_entropy, Data([fed.pool], torch.device("cpu"), torch.float32))
    models = pair(linear, engine.layout)
    (found,) = engine.pairs.compare([PairJob(models, fed.pool, {0: fed.clients[0].rows("train")})])
    first, second = engine.evaluate([EvalJob(m, fed.pool, fed.clients[0].train) for m in models])
    assert (found[0].gained - found[0].lost) / found[0].samples == pytest.approx(first.accuracy - second.accuracy)


def test_a_sequence_counts_with_the_part_that_differs():
    class PerPosition(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(2))

        def forward(self, x):  # (samples, classes, positions)
            return self.shift[None, :, None].expand(len(x), 2, x.shape[1])

    x, y = np.zeros((4, 4), np.float32), np.array([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    with pytest.warns(fa.FederationWarning):
        fed = fa.Federation.from_arrays([(x, y)], priority=[True], heldout_fraction=0.0)
    data = Data([fed.pool], torch.device("cpu"), torch.float32)
    pairs = PairComparer(PerPosition(), Layout(PerPosition()), data, classes=True)
    zeros, ones = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    (found,) = pairs.compare([PairJob((zeros, ones), fed.pool, {0: fed.clients[0].train})])
    assert found == {0: Outcomes(1.0, 1.5, 4)}


@pytest.mark.parametrize("classes", [True, False])
def test_the_driver_answers_runs_together(classes):
    feds = [federation(), federation(sizes=(30, 31, 20, 20, 20))]
    layout, seen = Layout(linear()), []
    models = pair(linear, layout)

    def run(which):
        seen.append((which, (yield Paired(models, (0, 1), "heldout"))))
        return Result(models[0], History())

    data = Data([f.pool for f in feds], torch.device("cpu"), torch.float32)
    engine = BatchedEngine(linear(), fa.cross_entropy, data, accuracy=classes)
    runs = [LiveRun(run(i), fed, fa.LocalSGD(lr=0.1, epochs=1), 0, 1, layout.size) for i, fed in enumerate(feds)]
    list(Driver(engine, runs).drive())
    for i, found in seen:
        wanted = {k: by_hand(linear, layout, models, feds[i], k, "heldout") for k in (0, 1)}
        assert found == (wanted if classes else {})
    assert len(seen) == 2
