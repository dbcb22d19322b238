"""SCAFFOLD: with one client it is SGD; its control variates sum; it finds the optimum that FedAvg's drift misses."""

import numpy as np
import pytest
import torch
from conftest import assert_resumes_alike, blobs
from torch import nn

import fedalign as fa
from fedalign.simulation import simulation
from fedalign.simulation.scaffold import Controls
from fedalign.simulation.spec import initial_module

SCAFFOLD = fa.LocalSGD(lr=0.05, epochs=2, batch_size=10, scaffold=True)
SGD = fa.LocalSGD(lr=0.05, epochs=2, batch_size=10)


def model():
    return nn.Linear(6, 4)


def federation(sizes=(30, 10, 20), priority=(True, True, False)):
    return fa.Federation.from_arrays([blobs(n, k) for k, n in enumerate(sizes)], priority=list(priority))


def run(fed, local, rule=None, rounds=4, make=model, **options):
    return fa.simulate(fed, make, rule or fa.Everyone(), rounds, 0, local, device="cpu", **options)


def test_with_one_client_it_is_sgd():
    fed = federation((30, 20), (True, False))
    for engine, same in (("reference", torch.equal), ("batched", torch.allclose)):  # which rounds in another order
        models = [run(fed, local, fa.PriorityOnly(), engine=engine).model for local in (SCAFFOLD, SGD)]
        assert same(models[0].weight, models[1].weight)


@pytest.fixture
def controls(monkeypatch):
    seen = []

    def make(*arguments):
        seen.append(Controls(*arguments))
        return seen[-1]

    monkeypatch.setattr(simulation, "Controls", make)
    return seen


def test_control_variates_sum_to_the_servers(controls):
    fed = federation()
    run(fed, SCAFFOLD, fa.PriorityOnly())
    (mine,) = controls
    weighted = sum(float(fed.p[k]) * mine.clients[k] for k in (0, 1))
    assert torch.allclose(mine.server, weighted, atol=1e-5)
    assert mine.server.abs().max() > 1e-3
    assert not mine.clients[2].any()  # it never took part


def test_a_variate_is_the_mean_gradient(controls):
    """After the first round, from zero, c_k is the client's mean gradient along its way: (w − w_k)/Ση."""
    fed = federation((30, 20), (True, False))
    result = run(fed, SCAFFOLD, fa.PriorityOnly(), rounds=1)
    start = initial_module(model, 0)
    steps = SCAFFOLD.steps_for(len(fed.clients[0].train))
    moved = (start.weight - result.model.weight).detach().reshape(-1)
    assert torch.allclose(controls[0].clients[0][:24], moved / (0.05 * steps), atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "batchnorm", "convolution"])
def test_engines_agree(kind):
    fed, make = federation(), model
    if kind == "batchnorm":

        def make():
            return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))

    if kind == "convolution":
        draw = np.random.default_rng(0)
        clients = [(draw.normal(size=(n, 1, 6, 6)), np.arange(n) % 3) for n in (12, 9, 7)]
        fed = fa.Federation.from_arrays(clients, priority=[True, True, False])

        def make():
            return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))

    models = [run(fed, SCAFFOLD, make=make, engine=engine).model.state_dict() for engine in ("batched", "reference")]
    for name in models[0]:
        assert torch.allclose(models[0][name].float(), models[1][name].float(), atol=1e-4), name


@pytest.mark.slow
def test_it_removes_the_drift_that_fedavg_has():
    """Two clients with unlike quadratics: many local steps pull FedAvg off the common optimum, not SCAFFOLD."""
    draw = np.random.default_rng(0)
    scales = (np.array([3.0, 0.3, 1.0]), np.array([0.3, 3.0, 1.0]))
    clients = []
    for scale, truth in zip(scales, draw.normal(size=(2, 3)) * 3, strict=True):
        x = draw.normal(size=(60, 3)) * scale
        clients.append((x.astype(np.float32), (x @ truth).astype(np.float32)[:, None]))
    with pytest.warns(fa.FederationWarning, match="all 2 clients are priority"):
        fed = fa.Federation.from_arrays(clients, priority=[True, True], heldout_fraction=0)
    x, y = (np.concatenate([c[i] for c in clients]) for i in (0, 1))
    optimum = torch.from_numpy(np.linalg.lstsq(x, y, rcond=None)[0].reshape(-1)).float()

    def distance(scaffold):
        local = fa.LocalSGD(lr=0.03, steps=50, batch_size=None, scaffold=scaffold)
        made = fa.simulate(
            fed, lambda: nn.Linear(3, 1, bias=False), fa.Everyone(), 400, 0, local, device="cpu", loss=fa.squared_error
        ).model
        return float((made.weight.detach().reshape(-1) - optimum).norm() / optimum.norm())

    assert distance(True) < 1e-3
    assert distance(False) > 0.05


def test_what_does_not_go_together():
    with pytest.raises(fa.FedalignError, match="scaffold corrects plain SGD"):
        fa.LocalSGD(lr=0.1, epochs=1, scaffold=True, momentum=0.9)
    for rule in (fa.AutoAlign(), fa.AutoAlign((0, 1)), fa.GradientAlign()):
        with pytest.raises(fa.FedalignError, match="SCAFFOLD cannot be combined with"):
            run(federation(), SCAFFOLD, rule)

    class Either(fa.AutoAlign):
        def candidates(self, offers, broadcast):
            return [fa.Selection(), fa.Selection(tuple(offers))]

    with pytest.raises(fa.FedalignError, match="several candidates"):
        run(federation(), SCAFFOLD, Either((3.0,)))
    one = run(federation(), SCAFFOLD, fa.AutoAlign((0.3,)))  # which is FedALIGN
    assert torch.equal(one.model.weight, run(federation(), SCAFFOLD, fa.Align(0.3)).model.weight)


def test_the_variates_survive_an_interruption(tmp_path, monkeypatch):
    settings = ["run", "synth-low", "--arms", "all,fedalign,local", "--seeds", "1", "--rounds", "8", "--quiet"]
    settings += ["--set", "local.scaffold=true", "--set", "server.kind=fedavgm", "--set", "data.samples=40"]
    assert_resumes_alike(monkeypatch, tmp_path, settings, round=5)
