"""The batched engine against the reference, on random federations and all kinds of models and local work."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from conftest import blobs, federation, flat, linear
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap

import fedalign as fa
from fedalign.simulation.engine.cnn.convolution import ProductConv2d, convolutions_as_products, is_plain
from fedalign.simulation.engine.linear_chain import chain
from fedalign.training import models


def images(n, seed):
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 4, n)
    x = draw.normal(size=(n, 1, 8, 8)).astype(np.float32) + y[:, None, None, None]
    return x, y


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4, bias=False))


def normalised():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))


def layer_norm():
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 4))


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(27, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 4),
    )


class Residual(nn.Module):
    """Not a chain of layers, and with a frozen part."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, x):
        return self.out(x + self.scale * self.inner(x).sigmoid())


locals_ = st.builds(
    fa.LocalSGD,
    lr=st.sampled_from([0.05, 0.2, fa.Linear(0.2, 0.05), fa.InverseTime(mu=1.0, gamma=20.0)]),
    epochs=st.integers(1, 3),
    batch_size=st.sampled_from([None, 1, 4, 7, 50]),
    momentum=st.sampled_from([0.0, 0.7]),
    weight_decay=st.sampled_from([0.0, 0.01]),
    clip=st.sampled_from([None, 0.3]),
    mu=st.sampled_from([0.0, 0.5]),
)
sizes = st.lists(st.integers(1, 30), min_size=2, max_size=6)


def make(sizes, data, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fa.FederationWarning)
        arrays = [data(n, 3 + k) for k, n in enumerate(sizes)]
        flags = [k % 2 == 0 for k in range(len(sizes))]
        return fa.Federation.from_arrays(arrays, test=arrays, priority=flags, **options)


def compare(fed, model, local, rounds=2, rule=None, **options):
    both = [
        fa.simulate(fed, model, rule or fa.Everyone(), rounds, 0, local, device="cpu", engine=engine, **options)
        for engine in ("reference", "batched")
    ]
    difference = (flat(both[0].model) - flat(both[1].model)).abs().max().item()
    assert difference < 1e-5
    for a, b in zip(both[0].history.rounds, both[1].history.rounds, strict=True):
        assert a.global_loss == pytest.approx(b.global_loss, abs=1e-5)
        assert a.test_loss == pytest.approx(b.test_loss, abs=1e-5)
        assert a.test_accuracy == pytest.approx(b.test_accuracy, abs=0.1)
        assert [c.decision for c in a.clients] == [c.decision for c in b.clients]


@given(sizes=sizes, local=locals_)
def test_logistic(sizes, local):
    compare(make(sizes, blobs), linear, local)


@given(sizes=sizes, local=locals_)
def test_network(sizes, local):
    compare(make(sizes, blobs), network, local)


@given(sizes=sizes, local=locals_)
def test_batchnorm(sizes, local):
    compare(make(sizes, blobs), normalised, local)


@given(sizes=sizes, local=locals_)
def test_any_module(sizes, local):
    compare(make(sizes, blobs), Residual, local)
    compare(make(sizes, blobs), layer_norm, local, rounds=1)


@given(sizes=st.lists(st.integers(1, 12), min_size=2, max_size=4), local=locals_)
def test_cnn_one_client_a_thread(sizes, local):
    compare(make(sizes, images), small_cnn, local, rounds=1)


@given(sizes=st.lists(st.integers(1, 12), min_size=2, max_size=4), local=locals_)
def test_cnn_stacked(sizes, local):
    """As on a GPU, where convolutions are stacked too."""
    compare(make(sizes, images), small_cnn, local, rounds=1, chunk=3)


def test_the_papers_cnn():
    draw = np.random.default_rng(0)

    def pictures(n, seed):
        return draw.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8), draw.integers(0, 10, n)

    fed = make([11, 7, 6], pictures, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.3))
    assert fed.pool.x.dtype == torch.uint8
    compare(fed, models.cnn, fa.LocalSGD(lr=0.01, epochs=1, batch_size=5), rounds=1)
    compare(fed, models.cnn, fa.LocalSGD(lr=0.01, epochs=1, batch_size=5), rounds=1, chunk=3)


@given(sizes=sizes, steps=st.integers(1, 9))
def test_steps_in_place_of_epochs(sizes, steps):
    compare(make(sizes, blobs), linear, fa.LocalSGD(lr=0.1, steps=steps, batch_size=4))


@pytest.mark.parametrize("model", [lambda: nn.Linear(6, 1), normalised])
def test_regression(model):
    def target(n, seed):
        x, y = blobs(n, seed)
        return x, np.stack([x[:, 0] + 0.1 * y] * (1 if model is not normalised else 4), 1).astype(np.float32)

    fed = make([20, 9, 14], target)
    compare(fed, model, fa.LocalSGD(lr=0.05, epochs=2, batch_size=5), loss=fa.squared_error)
    result = fa.simulate(fed, model, rounds=1, local=fa.LocalSGD(lr=0.05, epochs=1), loss=fa.squared_error)
    assert result.history[0].global_accuracy is None
    with pytest.raises(fa.FedalignError, match="matching on accuracy"):
        fa.simulate(fed, model, fa.Align(0.1, on="accuracy"), loss=fa.squared_error)
    with pytest.raises(fa.FedalignError, match="squared_error"):
        fa.simulate(fed, model)


def test_a_users_loss():
    def focal(outputs, y):
        logp = torch.log_softmax(outputs, 1).gather(1, y[:, None]).squeeze(1)
        return -((1 - logp.exp()) ** 2) * logp

    fed = make([20, 9, 14], blobs)
    for model in (linear, normalised):
        compare(fed, model, fa.LocalSGD(lr=0.2, epochs=2, batch_size=5), loss=focal)


def test_uint8_is_scaled_on_the_fly():
    def raw(n, seed):
        x, y = blobs(n, seed)
        return ((x - x.min()) * 30).clip(0, 255).astype(np.uint8), y

    def scaled(n, seed):
        x, y = raw(n, seed)
        return (x.astype(np.float32) / 255 - 0.2) / 0.5, y

    whole = make([20, 9, 14], raw, mean=0.2, std=0.5)
    local = fa.LocalSGD(lr=0.2, epochs=2, batch_size=5)
    first = fa.simulate(whole, linear, fa.Everyone(), 3, 0, local)
    second = fa.simulate(make([20, 9, 14], scaled), linear, fa.Everyone(), 3, 0, local)
    assert torch.allclose(flat(first.model), flat(second.model), atol=1e-6)
    assert whole.pool.x.dtype == torch.uint8


def test_runs_together_equal_runs_apart():
    specs = [
        fa.RunSpec(federation(seed=s), rule, 8, 0.25, fa.LocalSGD(lr=lr, epochs=2, batch_size=10), part, seed=s)
        for s in (0, 1)
        for rule, lr, part in [
            (fa.PriorityOnly(), 0.1, fa.Full()),
            (fa.Align(0.3), 0.1, fa.Uniform(0.6)),
            (fa.Everyone(), 0.2, fa.Bernoulli(0.5)),
            (fa.Alone(), 0.1, fa.Full()),
        ]
    ]
    together = fa.simulate_many(specs, linear, device="cpu")
    for spec, joint in zip(specs, together, strict=True):
        (apart,) = fa.simulate_many([spec], linear, device="cpu", engine="reference")
        pairs = (
            zip(joint.model, apart.model, strict=True)
            if isinstance(spec.rule, fa.Alone)
            else [(joint.model, apart.model)]
        )
        for a, b in pairs:
            assert torch.allclose(flat(a), flat(b), atol=1e-5)
        for r, s in zip(joint.history.rounds, apart.history.rounds, strict=True):
            assert [c.decision for c in r.clients] == [c.decision for c in s.clients]


def test_models_that_cannot_be_vectorised_are_trained_one_by_one():
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > -1e9 else x[:, :4]

    fed = make([20, 9], blobs)
    with pytest.warns(fa.FederationWarning, match="cannot be vectorised"):
        batched = fa.simulate(fed, lambda: Branching(6, 4), fa.Everyone(), 2, 0)
    reference = fa.simulate(fed, lambda: Branching(6, 4), fa.Everyone(), 2, 0, engine="reference")
    assert torch.allclose(flat(batched.model), flat(reference.model), atol=1e-5)


def test_which_models_are_written_out():
    assert chain(models.mlp(784, [200, 200], 47)) is not None
    assert chain(models.logistic(60, 10)) is not None
    assert chain(nn.Linear(3, 2)) is not None
    tied = nn.Linear(4, 4)
    for other in (
        models.cnn(),
        normalised(),
        Residual(),
        nn.Sequential(tied, tied),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
    ):
        assert chain(other) is None


@pytest.mark.parametrize(
    "options", [{}, {"padding": 2}, {"stride": 2}, {"stride": (1, 2), "padding": (1, 0)}, {"bias": False}]
)
def test_convolutions_as_products(options):
    """What a GPU runs: values and gradients of stacked clients' convolutions, against plain ones."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, (3, 2), **options))
    product = convolutions_as_products(copy.deepcopy(plain))
    assert isinstance(product[2], ProductConv2d)
    x = torch.randn(3, 5, 2, 9, 8)
    weights = {name: torch.randn(3, *p.shape) for name, p in plain.named_parameters()}

    def objective(module):
        return lambda w, rows: functional_call(module, w, (rows,)).square().sum()

    for k in range(3):
        one = {name: w[k] for name, w in weights.items()}
        assert torch.allclose(functional_call(plain, one, (x[k],)), functional_call(product, one, (x[k],)), atol=1e-4)
    stacked = vmap(grad(objective(product)))(weights, x)
    for k in range(3):
        alone = grad(objective(plain))({name: w[k] for name, w in weights.items()}, x[k])
        for name in alone:
            assert torch.allclose(stacked[name][k], alone[name], rtol=1e-4, atol=1e-3)
    assert not is_plain(nn.Conv2d(2, 2, 3, groups=2))
    assert not is_plain(nn.Conv2d(2, 2, 3, padding="same"))


def test_one_value_per_channel_uses_running_statistics():
    """A client with a single sample and BatchNorm trains, and leaves the running statistics alone."""
    with pytest.warns(fa.FederationWarning, match="one sample"):
        fed = fa.Federation.from_arrays([blobs(1, 0), blobs(8, 1)], priority=[True, False])
    result = fa.simulate(fed, normalised, fa.PriorityOnly(), 2, 0, fa.LocalSGD(lr=0.1, epochs=2))
    layer = result.model[1]
    assert torch.equal(layer.running_mean, torch.zeros(5))
    assert int(layer.num_batches_tracked) == 0
    assert not torch.equal(layer.bias, torch.zeros(5))


class OwnState(nn.Module):
    """Keeps a running mean of its own."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 4)
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        return self.out(x - self.centre)


def hooked():
    layer = nn.Linear(6, 4)
    layer.register_forward_hook(lambda module, inputs, outputs: 3 * outputs)
    return layer


def spatial():
    return nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Flatten(), nn.Linear(15, 4))


def test_odd_models_agree_too():
    local = fa.LocalSGD(lr=0.1, epochs=2, batch_size=4)
    fed = make([13, 9, 7], blobs)
    compare(fed, hooked, local)
    with pytest.raises(fa.FedalignError, match="without running statistics"):
        compare(fed, lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False)), local)
    compare(fed, lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None)), local)
    with pytest.warns(fa.FederationWarning, match="training changes its buffer centre"):
        compare(fed, OwnState, local)

    def folded(n, seed):
        x, y = blobs(n, seed)
        return x.reshape(n, 3, 2), y

    compare(make([13, 9, 7], folded), spatial, local)
    compare(make([13, 9, 7], folded), lambda: models.logistic(6, 4), local)


def test_one_score_has_no_accuracy():
    def binary(outputs, y):
        return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], y.float(), reduction="none")

    def two(n, seed):
        x, y = blobs(n, seed)
        return x, y % 2

    fed = make([13, 9, 7], two)
    compare(fed, lambda: nn.Linear(6, 1), fa.LocalSGD(lr=0.1, epochs=2, batch_size=4), loss=binary)
    result = fa.simulate(fed, lambda: nn.Linear(6, 1), rounds=1, loss=binary)
    assert result.history[0].global_accuracy is None


def test_sequences_of_labels():
    def tokens(n, seed):
        draw = np.random.default_rng(seed)
        x = draw.integers(0, 9, (n, 5))
        return x, x % 3

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.out(self.embed(x)).transpose(1, 2)

    def loss(outputs, y):
        return nn.functional.cross_entropy(outputs, y, reduction="none").mean(1)

    fed = make([13, 9, 7], tokens)
    compare(fed, Tagger, fa.LocalSGD(lr=0.5, epochs=2, batch_size=4), loss=loss)
    result = fa.simulate(fed, Tagger, rounds=20, local=fa.LocalSGD(lr=1.0, epochs=5, batch_size=4), loss=loss)
    assert result.history[-1].global_accuracy > 0.9


def test_a_module_gives_the_start_and_is_left_alone():
    start = linear()
    before = flat(start)
    result = fa.simulate(federation(), start, rounds=2, warmup=0)
    assert torch.equal(flat(start), before)
    assert not torch.equal(flat(result.model), before)
