"""Local optimisers: batched equals reference on random federations, and the reference's are PyTorch's own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from conftest import blobs, flat
from hypothesis import given
from hypothesis import strategies as st
from test_engines import Residual, compare, images, make, network
from torch import nn

import fedalign as fa
from fedalign.training.optimizer import descend


def double(make_model):
    """Give a model of float64: Adam divides gradients of rounding noise by their own size."""
    return lambda: make_model().double()


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(27, 4),
    )


adams = st.builds(
    lambda kind, **options: kind(**options),
    kind=st.sampled_from([fa.LocalAdam, fa.LocalAdamW]),
    lr=st.sampled_from([0.01, 0.1, fa.Linear(0.1, 0.02), fa.InverseTime(mu=1.0, gamma=40.0)]),
    epochs=st.integers(1, 3),
    batch_size=st.sampled_from([None, 1, 4, 7, 50]),
    beta1=st.sampled_from([0.0, 0.9]),
    beta2=st.sampled_from([0.9, 0.999]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    clip=st.sampled_from([None, 0.3]),
    mu=st.sampled_from([0.0, 0.5]),
)
sizes = st.lists(st.integers(1, 30), min_size=2, max_size=6)
chunks = st.sampled_from([None, 1, 2, 3])


@given(sizes=sizes, local=adams, chunk=chunks)
def test_adam_of_chains(sizes, local, chunk):
    compare(make(sizes, blobs), double(network), local, chunk=chunk)


@given(sizes=sizes, local=adams, chunk=chunks)
def test_adam_of_any_module(sizes, local, chunk):
    compare(make(sizes, blobs), double(Residual), local, chunk=chunk)


@given(sizes=st.lists(st.integers(1, 12), min_size=2, max_size=4), local=adams, chunk=chunks)
def test_adam_of_a_cnn(sizes, local, chunk):
    compare(make(sizes, images), double(small_cnn), local, rounds=1, chunk=chunk)


@pytest.mark.parametrize("kind", [fa.LocalAdam, fa.LocalAdamW])
def test_adam_in_float32(kind):
    local = kind(lr=0.01, epochs=2, batch_size=7, weight_decay=0.01)
    compare(make([30, 17, 9], blobs), network, local, rounds=4)


@pytest.mark.parametrize("rate", [0.01, torch.tensor([0.01, 0.01, 0.01])])
@pytest.mark.parametrize("kind", [fa.LocalAdam, fa.LocalAdamW])
def test_the_rule_is_pytorchs(kind, rate):
    """Ten steps of a stack of three against ``torch.optim`` on each of them."""
    torch.manual_seed(0)
    local = kind(lr=0.01, epochs=1, weight_decay=0.0)  # which the engines apply
    stack = [torch.randn(3, 4, 2), torch.randn(3, 5)]
    ones = [[torch.nn.Parameter(t[k].clone()) for t in stack] for k in range(3)]
    optimizers = [local.reference(parameters) for parameters in ones]
    state = local.state(stack)
    for _ in range(10):
        gradients = [torch.randn_like(t) for t in stack]
        for k, (parameters, optimizer) in enumerate(zip(ones, optimizers, strict=True)):
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g[k].clone()
            optimizer.param_groups[0]["lr"] = 0.01
            optimizer.step()
        local.update(stack, gradients, state, rate)
    for k, parameters in enumerate(ones):
        for p, t in zip(parameters, stack, strict=True):
            assert torch.allclose(p, t[k], atol=1e-6)


def test_a_client_at_rate_zero_stays():
    for local in (fa.LocalAdam(lr=0.1, epochs=1), fa.LocalAdamW(lr=0.1, epochs=1), fa.LocalSGD(lr=0.1, epochs=1)):
        stack = [torch.ones(2, 3)]
        local.update(stack, [torch.ones(2, 3)], local.state(stack), torch.tensor([0.0, 0.1]))
        assert torch.equal(stack[0][0], torch.ones(3))
        assert not torch.equal(stack[0][1], torch.ones(3))


@dataclass(frozen=True)
class SignSGD(fa.LocalOptimizer):
    """A user's own rule: steps along the sign of a running mean of gradients."""

    keep: float = 0.5

    def state(self, parameters):
        return {"mean": [torch.zeros_like(p) for p in parameters]}

    def update(self, parameters, gradients, state, rate):
        for p, g, mean in zip(parameters, gradients, state["mean"], strict=True):
            descend(p, mean.mul_(self.keep).add_(g).sign(), rate)


@pytest.mark.parametrize("model", [network, Residual])
@pytest.mark.parametrize("lr", [0.01, fa.InverseTime(mu=1.0, gamma=40.0)])
def test_a_users_own_rule(model, lr):
    local = SignSGD(lr=lr, epochs=2, batch_size=7, weight_decay=0.01, mu=0.1, clip=0.5)
    compare(make([30, 17, 9], blobs), double(model), local)


def test_a_users_rule_with_decoupled_decay():
    @dataclass(frozen=True)
    class Decoupled(SignSGD):
        decoupled = True

    fed = make([30, 17, 9], blobs)
    local = Decoupled(lr=0.01, epochs=2, batch_size=7, weight_decay=0.5)
    compare(fed, double(network), local)
    ends = [
        flat(fa.simulate(fed, network, fa.Everyone(), 2, 0, kind(lr=0.01, epochs=2, weight_decay=0.5)).model)
        for kind in (SignSGD, Decoupled)
    ]
    assert not torch.allclose(ends[0], ends[1])


def test_adam_of_clients_alone():
    compare_alone = [
        fa.simulate(make([9, 7], blobs), network, fa.Alone(), 2, 0, fa.LocalAdam(lr=0.01, epochs=1), engine=engine)
        for engine in ("reference", "batched")
    ]
    for a, b in zip(compare_alone[0].model, compare_alone[1].model, strict=True):
        assert torch.allclose(flat(a), flat(b), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta1": 1.0}, "beta1 must be a number from 0 to below 1, not 1.0"),
        ({"beta2": -0.1}, "beta2 must be"),
        ({"eps": 0.0}, "eps must be a small number above 0, not 0.0"),
        ({"weight_decay": -1}, "weight_decay must be at least 0"),
        ({"epochs": None}, "give epochs or steps"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(fa.FedalignError, match=message):
        fa.LocalAdam(**{"lr": 0.1, "epochs": 1, **options})


def test_scaffold_is_sgds_alone():
    with pytest.raises(TypeError, match="scaffold"):
        fa.LocalAdam(lr=0.1, epochs=1, scaffold=True)
