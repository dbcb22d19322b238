"""Models that draw random numbers: the same masks in both engines, for any chunk size; none in evaluation."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import blobs, federation, flat
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engines import compare, images, make
from torch import nn

import fedalign as fa
from fedalign.simulation.engine.cnn.stacked_chain import StackedChain
from fedalign.simulation.engine.random_functions import HashedDraws

LOCAL = fa.LocalSGD(lr=0.1, epochs=2, batch_size=7)


def mlp(p=0.4):
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(p), nn.Linear(16, 8), nn.Dropout(0.1), nn.Linear(8, 4))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(8, 4),
    )


class Transformer(nn.Module):
    """A small encoder with PyTorch's default dropout of 0.1, samples first or second."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.first = batch_first
        self.embed = nn.Linear(2, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        x = self.embed(x)
        x = self.encoder(x) if self.first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return self.out(x.mean(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(2, 1, dropout=0.2, batch_first=True), nn.Linear(6, 4)

    def forward(self, x):
        return self.out(self.attend(x, x, x)[0].flatten(1))


class Noise(nn.Module):
    """Draws with plain functions in its forward."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 4)

    def forward(self, x):
        if self.training:
            x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(x.shape, device=x.device)
            x = x * torch.bernoulli(torch.full_like(x, 0.7))
            x = F.dropout(x, 0.1, self.training) + 0.1 * torch.randint(0, 3, x.shape, device=x.device)
            x = x + F.gumbel_softmax(x)
        return self.out(x)


def folded(n, seed):
    x, y = blobs(n, seed)
    return x.reshape(n, 3, 2), y


@settings(max_examples=8)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=5),
    batch_size=st.sampled_from([None, 4, 7, 50]),
    chunk=st.sampled_from([None, 1, 2]),
    kind=st.sampled_from([fa.LocalSGD, fa.LocalAdam]),
)
def test_mlp(sizes, batch_size, chunk, kind):
    local = kind(lr=0.05, epochs=2, batch_size=batch_size)
    compare(make(sizes, blobs), lambda: mlp().double(), local, chunk=chunk)


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_cnn(chunk):
    compare(make([12, 5, 9, 1], images), cnn, LOCAL, chunk=chunk)


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer(batch_first):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is vectorised over clients, not trained one by one
        compare(make([12, 5, 9, 1], folded), lambda: Transformer(batch_first), LOCAL)


def test_attention_that_gives_its_weights():
    compare(make([12, 5, 9, 1], folded), Attention, LOCAL)


def test_functions_called_in_a_forward():
    compare(make([12, 5, 9, 1], blobs), Noise, LOCAL)


@pytest.mark.parametrize(
    "layer", [nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2), nn.Dropout1d(0.3), nn.Dropout(0.3, inplace=True)]
)
def test_other_dropout_layers(layer):
    def model():
        return nn.Sequential(nn.Linear(2, 5), nn.SELU(), layer, nn.Flatten(), nn.Linear(15, 4))

    compare(make([12, 5, 9], folded), model, LOCAL)


@pytest.mark.parametrize("model", [mlp, Transformer])
def test_chunks_and_neighbours_do_not_matter(model):
    fed = make([12, 5, 9, 13, 8], blobs if model is mlp else folded)
    ends = [
        flat(fa.simulate(fed, model, fa.Everyone(), 3, 0, LOCAL, device="cpu", chunk=chunk).model)
        for chunk in (None, 2, 3, 5)
    ]
    for other in ends[1:]:
        assert torch.allclose(ends[0], other, atol=1e-6)


def test_draws_do_not_depend_on_earlier_rounds():
    """What a resume needs: a round's draws follow from its number alone."""
    from fedalign.simulation.engine.batched import BatchedEngine
    from fedalign.simulation.engine.jobs import Data, TrainJob

    fed = make([12, 5, 9], blobs)
    torch.manual_seed(0)
    template = mlp()

    def end(rounds):
        engine = BatchedEngine(template, fa.cross_entropy, Data([fed.pool], torch.device("cpu"), torch.float32))
        start = engine.layout.flatten(template)
        for round in rounds:
            jobs = [TrainJob(start, fed.pool, c.train, LOCAL, 0, round, 9, k) for k, c in enumerate(fed.clients)]
            trained = torch.stack([one.model for one in engine.train(jobs)])
        return trained

    assert torch.equal(end([0, 1, 2, 3]), end([3]))
    assert not torch.equal(end([2]), end([3]))


def test_dropout_trains_another_model_and_a_rate_of_zero_does_not():
    fed = make([20, 15], blobs)

    def end(model, seed=0):
        return flat(fa.simulate(fed, model, fa.Everyone(), 2, 0, LOCAL, seed=seed, device="cpu").model)

    def without():
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 4))

    def nothing_dropped():
        return nn.Sequential(
            nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 8), nn.Dropout(0.0), nn.Linear(8, 4)
        )

    assert torch.allclose(end(without), end(nothing_dropped), atol=1e-6)
    assert not torch.allclose(end(without), end(mlp), atol=1e-3)
    assert torch.equal(end(mlp), end(mlp))


def test_evaluation_draws_nothing():
    """The losses in the records are those of the model in evaluation mode."""
    fed = make([20, 15], blobs)
    result = fa.simulate(fed, mlp, fa.Everyone(), 2, 0, LOCAL, device="cpu")
    model = result.model.eval()
    rows = fed.clients[0].test  # the one priority client's
    expected = F.cross_entropy(model(fed.pool.x[rows]), fed.pool.y[rows]).item()
    assert result.history[-1].test_loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_is_right(p):
    with HashedDraws(torch.tensor(5)):
        y = F.dropout(torch.ones(500, 400), p)
        channels = F.dropout2d(torch.ones(500, 400, 2, 2), p)
    assert (y == 0).double().mean().item() == pytest.approx(p, abs=0.005)
    assert y.max().item() == pytest.approx(1 / (1 - p))
    assert y.mean().item() == pytest.approx(1, abs=0.02)
    assert torch.equal(channels[:, :, 0, 0], channels[:, :, 1, 1])
    assert (y == 0).double().mean(0).std().item() == pytest.approx((p * (1 - p) / 500) ** 0.5, rel=0.1)
    assert (y == 0).double().mean(1).std().item() == pytest.approx((p * (1 - p) / 400) ** 0.5, rel=0.1)


def test_numbers_have_the_right_distributions():
    with HashedDraws(torch.tensor(5)):
        u, v, n = torch.rand(200_000), torch.rand(200_000), torch.randn(200_000)
        e, b = torch.empty(200_000).exponential_(2.0), torch.empty(200_000).bernoulli_(0.3)
        i, m = torch.randint(2, 5, (200_000,)), torch.normal(torch.full((200_000,), 3.0), 0.5)
        same = torch.rand(3, dtype=torch.float64), torch.rand(2, 3)
    assert not torch.equal(u, v)
    assert u.min() >= 0
    assert u.max() < 1
    for drawn, mean, std in (
        (u, 0.5, 12**-0.5), (n, 0, 1), (e, 0.5, 0.5), (b, 0.3, 0.21**0.5), (i.float(), 3, (2 / 3) ** 0.5), (m, 3, 0.5),
    ):  # fmt: skip
        assert drawn.mean().item() == pytest.approx(mean, abs=0.01)
        assert drawn.std().item() == pytest.approx(std, abs=0.01)
    assert same[0].dtype == torch.float64
    assert same[1].shape == (2, 3)


def test_masks_do_not_depend_on_padding_or_type():
    layer = nn.Dropout(0.5)
    for shape, padded in (((3, 4), (8, 4)), ((5, 3, 4), (5, 8, 4)), ((6, 7), (12, 7))):
        with HashedDraws(torch.tensor(1)):
            small = layer(torch.ones(shape))
        with HashedDraws(torch.tensor(1)):
            large = layer(torch.ones(padded, dtype=torch.float64))
        inside = tuple(slice(0, side) for side in shape)
        assert torch.equal(small.double(), large[inside])


def test_stacked_chains_drop_out_alike():
    """What a GPU runs for convolutional chains, against ``torch.func`` with the same keys."""
    from fedalign.data.samples import Pool
    from fedalign.simulation.engine.jobs import Data
    from fedalign.simulation.engine.layout import Layout
    from fedalign.simulation.engine.vmapped import VmapStepper

    torch.manual_seed(0)
    template = cnn().double()
    layout = Layout(template)
    assert StackedChain.serves(template)
    pool = Pool(torch.zeros(4, 1, 8, 8, dtype=torch.float64), torch.arange(4))
    stepper = VmapStepper(template, layout, fa.cross_entropy, Data([pool], torch.device("cpu"), torch.float64))
    stepper._module.train()
    named = layout.unflatten(torch.stack([layout.flatten(template)] * 3))
    parameters = {name: named.pop(name) for name in layout.names[: layout.trainable]}
    x, y = torch.randn(3, 6, 1, 8, 8).double(), torch.randint(0, 4, (3, 6))
    weights, keys = torch.full((3, 6), 1 / 6).double(), torch.tensor([3, 4, 5])
    expected, _ = stepper._gradient(parameters, named, x, y, weights, keys)
    found, _ = StackedChain(template, fa.cross_entropy).gradient(parameters, named, x, y, weights, keys)
    for name in expected:
        assert torch.allclose(found[name], expected[name], atol=1e-9), name


class Mixed(nn.Module):
    """Drops out rows of (place, sample) pairs, so that a sample's mask depends on how many samples there are."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(2, 4)

    def forward(self, x):
        rows = F.dropout(x.transpose(0, 1).reshape(-1, 2), 0.3, self.training)
        return self.out(rows.view(3, len(x), 2).mean(0))


def test_masks_that_depend_on_the_batch_are_trained_one_by_one():
    with pytest.warns(fa.FederationWarning, match="random numbers depend on the size of the batch"):
        compare(make([12, 5, 9], folded), Mixed, LOCAL)


class Always(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3)


class Hidden(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (random.random() if self.training else 1)


class HiddenNumPy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + (float(np.random.rand()) if self.training else 0)


class Recurrent(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.cell, self.out = nn.LSTM(2, 3, 2, dropout=dropout, batch_first=True), nn.Linear(3, 4)

    def forward(self, x):
        return self.out(self.cell(x)[0][:, -1])


class Checkpointed(nn.Module):
    """Computes its inner part again in the backward pass, where nothing is intercepted."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5)), nn.Linear(16, 4)

    def forward(self, x):
        return self.out(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False))


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (lambda: Always(6, 4), blobs, "random numbers in evaluation too"),
        (lambda: Hidden(6, 4), blobs, "hidden state"),
        (lambda: HiddenNumPy(6, 4), blobs, "hidden state"),
        (Checkpointed, blobs, "hidden state"),
        (lambda: Recurrent(0.3), folded, "torch.lstm, whose random numbers"),
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.RReLU()), blobs, "torch.rrelu, whose random numbers"),
    ],
)
def test_what_cannot_be_repeated_is_refused(model, data, message):
    with pytest.raises(fa.FedalignError, match=message):
        fa.simulate(make([9, 7], data), model, rounds=1)


def test_recurrent_layers_without_dropout_train():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's: vmap does recurrent layers slowly
        compare(make([9, 7], folded), lambda: Recurrent(0.0), LOCAL, rounds=1)


def test_the_global_generator_is_left_alone():
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5))
    before = torch.get_rng_state()
    fa.simulate(federation(), model, rounds=1, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
