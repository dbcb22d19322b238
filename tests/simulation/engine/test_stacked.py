"""What a GPU runs, on the CPU: convolutional chains over stacked clients, against ``torch.func`` and plain layers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedalign as fa
from fedalign.data.samples import Pool
from fedalign.simulation.engine.cnn.normalisation import StackedNorm
from fedalign.simulation.engine.cnn.pooling import ReluPool, poolable
from fedalign.simulation.engine.cnn.stacked_chain import StackedChain
from fedalign.simulation.engine.jobs import Data
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.engine.linear_chain import softmax_gradient
from fedalign.simulation.engine.vmapped import VmapStepper
from fedalign.training import models


def strided():
    return nn.Sequential(
        nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0), bias=False),
        nn.BatchNorm2d(5, affine=False),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Sequential(nn.Conv2d(5, 4, 2), nn.Tanh(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.LazyLinear(6),
        nn.BatchNorm1d(6, momentum=None),
        nn.Sigmoid(),
        nn.Linear(6, 10),
    )


def frozen():
    model = nn.Sequential(nn.Conv2d(3, 4, 5), nn.ReLU(), nn.MaxPool2d((2, 4)), nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 3, 32, 32))
    model[0].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("make", [models.cnn, strided, frozen])
def test_gradients_of_a_chain(make):
    torch.manual_seed(0)
    template = make().double()
    template.eval()(torch.zeros(2, 3, 32, 32, dtype=torch.float64))
    layout = Layout(template)
    assert StackedChain.serves(template)
    pool = Pool(torch.zeros(4, 3, 32, 32, dtype=torch.float64), torch.arange(4))
    stepper = VmapStepper(template, layout, fa.cross_entropy, Data([pool], torch.device("cpu"), torch.float64))
    stepper._module.train()
    flat = torch.stack([layout.flatten(template) + 0.1 * torch.randn(layout.size).double() for _ in range(4)])
    for name, piece, _ in layout.pieces(flat):
        if name.endswith("running_var"):
            piece.abs_()
        if name.endswith("num_batches_tracked"):
            piece.copy_(torch.tensor([0.0, 3.0, 1.0, 2.0]).view(piece.shape))
    named = layout.unflatten(flat)
    parameters = {name: named.pop(name) for name in layout.names[: layout.trainable]}
    x, y = torch.randn(4, 6, 3, 32, 32).round(decimals=1).double(), torch.randint(0, 10, (4, 6))
    weights = torch.full((4, 6), 1 / 6).double()
    weights[1] = torch.tensor([1 / 3] * 3 + [0] * 3)  # a padded batch, a batch of one, and a client that has finished
    weights[2] = torch.tensor([1.0] + [0] * 5)
    weights[3] = 0
    expected, expected_statistics = stepper._gradient(parameters, named, x, y, weights, None)
    gradients, statistics = StackedChain(template, fa.cross_entropy).gradient(parameters, named, x, y, weights)
    assert gradients.keys() == expected.keys()
    assert statistics.keys() == expected_statistics.keys()
    for name in expected:
        assert torch.allclose(gradients[name], expected[name], atol=1e-9), name
    for name in expected_statistics:
        assert torch.allclose(statistics[name], expected_statistics[name], atol=1e-12), name


def test_chains_that_are_not_served():
    conv, tied = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)
    hooked = nn.Sequential(copy.deepcopy(conv), nn.Flatten(), nn.Linear(2700, 2))
    assert StackedChain.serves(hooked)
    hooked[0].register_forward_hook(lambda *_: None)
    for other in (
        models.mlp(4, [3], 2),  # written out in linear_chain.py
        nn.Sequential(conv, nn.ReLU()),  # gives images
        nn.Sequential(conv, nn.Linear(30, 4), nn.Flatten()),
        nn.Sequential(tied, tied, nn.Flatten()),
        nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.Flatten()),
        nn.Sequential(nn.Conv2d(3, 3, 3, padding="same"), nn.Flatten()),
        nn.Sequential(conv, nn.GELU(), nn.Flatten()),
        hooked,
    ):
        assert not StackedChain.serves(other)


@pytest.mark.parametrize("window", [(2, 2), (2, 3), (1, 4)])
def test_bias_relu_and_pooling_in_one_go(window):
    """Equal numbers in a window are common (flat image regions): the first of them gets the gradient."""
    torch.manual_seed(0)
    x = torch.randn(6, 7, 9, 5).round().requires_grad_()
    bias = torch.randn(3, 5).requires_grad_()
    moved = (x.unflatten(0, (3, 2)) + bias.view(3, 1, 1, 1, 5)).flatten(0, 1)
    plain = F.max_pool2d(moved.relu().permute(0, 3, 1, 2), window).permute(0, 2, 3, 1)
    ours = ReluPool.apply(x, bias, window)
    assert torch.equal(ours, plain)
    g = torch.randn(plain.shape)
    for mine, theirs in zip(
        torch.autograd.grad(ours, [x, bias], g), torch.autograd.grad(plain, [x, bias], g), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_not_a_number_goes_through_pooling():
    x = torch.ones(1, 2, 2, 1)
    x[0, 1, 0, 0] = torch.nan
    assert ReluPool.apply(x, None, (2, 2)).isnan().all()


def test_which_poolings_are_done_in_one_go():
    assert poolable(nn.ReLU(), nn.MaxPool2d(2)) == (2, 2)
    assert poolable(nn.ReLU(), nn.MaxPool2d((3, 2))) == (3, 2)
    for other in (
        nn.MaxPool2d(3, stride=2),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, dilation=2),
        nn.AvgPool2d(2),
    ):
        assert poolable(nn.ReLU(), other) is None
    assert poolable(nn.Tanh(), nn.MaxPool2d(2)) is None


def test_stacked_batchnorm_is_batchnorm():
    torch.manual_seed(0)
    x = (3 + 2 * torch.randn(2, 24, 5).double()).requires_grad_()
    weight, bias = torch.randn(2, 5).double().requires_grad_(), torch.randn(2, 5).double().requires_grad_()
    real = torch.ones(2, 6).double()
    real[1, 4:] = 0
    running = (torch.zeros(2, 5).double(), torch.ones(2, 5).double())
    ours, mean, var = StackedNorm.apply(x, real, weight, bias, running, 1e-5)
    for k, rows in enumerate((24, 16)):
        plain = F.batch_norm(x[k, :rows], None, None, weight[k], bias[k], training=True)
        assert torch.allclose(ours[k, :rows], plain)
        assert torch.allclose(mean[k], x[k, :rows].mean(0))
        assert torch.allclose(var[k], x[k, :rows].var(0, correction=0))
        g = torch.randn(rows, 5).double()
        padded = torch.zeros(24, 5).double()
        padded[:rows] = g
        mine = torch.autograd.grad(ours[k], [x, weight, bias], padded, retain_graph=True)
        theirs = torch.autograd.grad(plain, [x, weight, bias], g)
        for a, b in zip(mine, theirs, strict=True):
            assert torch.allclose(a, b)


def test_softmax_gradient():
    scores, y, weights = torch.randn(3, 4, 7).requires_grad_(), torch.randint(0, 4, (3, 7)), torch.rand(3, 7)
    loss = (F.cross_entropy(scores, y, reduction="none") * weights).sum()
    (expected,) = torch.autograd.grad(loss, scores)
    delta, bias_done = softmax_gradient(scores.detach(), y, weights, torch.zeros(3, 4))
    assert torch.allclose(delta, expected, atol=1e-6)
    assert not bias_done
