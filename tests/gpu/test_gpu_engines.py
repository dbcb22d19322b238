"""The batched engine on a GPU against the reference engine on the CPU."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from gpu_cases import LOCALS, MODELS, engines, full_precision, jobs_for, needs_gpu, on_devices, on_gpu, trained

import fedalign as fa
from fedalign.simulation.engine.jobs import EvalJob
from fedalign.simulation.engine.pairs import PairJob
from fedalign.training.optimizer import descend

__all__ = ["full_precision"]


def close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


FEW = [(model, local, "cpu") for model, local in (("logistic", "sgd"), ("dropout mlp", "adamw"), ("cnn", "momentum"))]
EACH = [pytest.param(model, local, "cuda", marks=needs_gpu) for model in MODELS for local in LOCALS]


@pytest.mark.parametrize(("model", "local", "device"), FEW + EACH)
def test_training(model, local, device):
    fed, start, reference, batched = engines(*MODELS[model], device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fa.FederationWarning)  # stacked, and on a GPU as a graph
        found = trained(batched, jobs_for(fed, start.to(device), LOCALS[local]))
    expected = trained(reference, jobs_for(fed, start, LOCALS[local]))
    assert not torch.allclose(expected[2], start, atol=1e-3)
    difference = (expected - found).abs().max().item()
    assert close(expected, found), f"largest difference of a weight: {difference:.1e}"


@on_devices
@pytest.mark.parametrize("model", list(MODELS))
def test_evaluation(device, model):
    fed, start, reference, batched = engines(*MODELS[model], device)
    found = batched.evaluate([EvalJob(start.to(device), fed.pool, c.train) for c in fed.clients])
    expected = reference.evaluate([EvalJob(start, fed.pool, c.train) for c in fed.clients])
    for a, b in zip(expected, found, strict=True):
        assert a.loss == pytest.approx(b.loss, abs=1e-5)
        assert a.accuracy == pytest.approx(b.accuracy, abs=0.05)


@on_devices
@pytest.mark.parametrize("model", list(MODELS))
def test_pairs_of_models(device, model):
    fed, start, reference, batched = engines(*MODELS[model], device)
    torch.manual_seed(3)
    other = start + 0.1 * torch.rand_like(start)  # positive: a BatchNorm variance stays one
    rows = {k: client.train for k, client in enumerate(fed.clients)}
    (expected,) = reference.pairs.compare([PairJob((start, other), fed.pool, rows)])
    (found,) = batched.pairs.compare([PairJob((start.to(device), other.to(device)), fed.pool, rows)])
    for k, one in expected.items():  # a sample whose scores tie may be rounded the other way
        assert found[k].samples == one.samples
        assert abs(found[k].gained - one.gained) + abs(found[k].lost - one.lost) <= 2


@on_gpu
@pytest.mark.parametrize("local", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("model", ["mlp", "dropout mlp", "dropout cnn"])
def test_a_round_leaves_nothing_behind(device, model, local):
    """A graph that is replayed gives what a new one gives: momentum, moments and step counts start anew."""
    fed, start, _, used = engines(*MODELS[model], device)
    for round in range(3):
        last = trained(used, jobs_for(fed, start.to(device), LOCALS[local], round))
    fed, start, _, fresh = engines(*MODELS[model], device)
    assert close(last, trained(fresh, jobs_for(fed, start.to(device), LOCALS[local], 2)))
    assert not torch.allclose(last[2], trained(fresh, jobs_for(fed, start.to(device), LOCALS[local], 1))[2])


@on_gpu
@pytest.mark.parametrize("model", ["dropout mlp", "dropout cnn", "transformer"])
def test_chunks_do_not_matter(device, model):
    ends = []
    for chunk in (None, 2, 3):
        fed, start, _, batched = engines(*MODELS[model], device, chunk=chunk)
        ends.append(trained(batched, jobs_for(fed, start.to(device), LOCALS["sgd"])))
    assert close(ends[0], ends[1])
    assert close(ends[0], ends[2])


@dataclass(frozen=True)
class Smoothed(fa.LocalOptimizer):
    """A user's own rule, with state: steps along ``g/(1 + |mean|)``."""

    def state(self, parameters):
        return {"mean": [torch.zeros_like(p) for p in parameters]}

    def update(self, parameters, gradients, state, rate):
        for p, g, mean in zip(parameters, gradients, state["mean"], strict=True):
            descend(p, g / (1 + mean.mul_(0.5).add_(g).abs()), rate)


@on_gpu
@pytest.mark.parametrize("model", ["logistic", "normalised mlp", "cnn"])
def test_a_users_own_rule(device, model):
    local = Smoothed(lr=0.05, epochs=2, batch_size=20, weight_decay=0.01)
    fed, start, reference, batched = engines(*MODELS[model], device)
    found = trained(batched, jobs_for(fed, start.to(device), local))
    assert close(trained(reference, jobs_for(fed, start, local)), found)


@on_devices
def test_scaffold(device):
    make, shape = MODELS["mlp"]
    fed, *_ = engines(make, shape, device)
    local = fa.LocalSGD(lr=0.05, epochs=2, batch_size=20, scaffold=True)
    ends = [
        fa.simulate(fed, make, fa.Everyone(), 3, 0, local, device=where, engine=engine).model.state_dict()
        for where, engine in (("cpu", "reference"), (device, "batched"))
    ]
    for name, expected in ends[0].items():
        assert close(expected, ends[1][name].cpu()), name
