"""Every GPU kernel against its plain version on the CPU, and hashes that are the same on both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gpu_cases import full_precision, needs_gpu, on_devices
from torch import nn

from fedalign.simulation.engine.cnn import kernels, reduction_kernels
from fedalign.simulation.engine.cnn.convolution import ProductConv2d, add_patches, cut_patches, places
from fedalign.simulation.engine.cnn.normalisation import StackedNorm
from fedalign.simulation.engine.cnn.pooling import ReluPool
from fedalign.simulation.engine.linear_chain import softmax_gradient
from fedalign.simulation.engine.random_functions import HashedDraws
from fedalign.training.randomness import hashed, hashed_positions, permutations, permutations_on

__all__ = ["full_precision"]

SIZES = [(3, 3, 1, 1), (5, 5, 1, 1), (3, 2, 2, 1), (2, 2, 2, 2), (1, 1, 1, 1)]


def both(function, *tensors, device):
    """Call a function with the tensors on the CPU and on a device; give both results on the CPU."""
    plain = function(*(t.clone() for t in tensors))
    found = function(*(t.to(device) for t in tensors))
    return plain, found.cpu()


def derivatives(function, inputs, direction, device):
    """Give a function's value and its gradients, computed on a device."""
    leaves = [t.detach().to(device).requires_grad_() for t in inputs]
    value = function(*leaves)
    gradients = torch.autograd.grad(value, leaves, direction.to(device))
    return [t.detach().cpu() for t in (value, *gradients)]


@needs_gpu
def test_kernels_are_there():
    for name in ("cut", "add", "pool", "unpool"):
        assert getattr(kernels, f"{name}_kernel") is not None, name
    for name in ("norm", "norm_back", "softmax"):
        assert getattr(reduction_kernels, f"{name}_kernel") is not None, name


@on_devices
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("channels", [1, 3, 8])
def test_cutting_patches(device, size, channels):
    torch.manual_seed(0)
    x = torch.randn(4, channels, 9, 8).permute(0, 2, 3, 1)  # not contiguous, as a model's first layer has it
    for images in (x, x.contiguous()):
        plain, found = both(lambda t: cut_patches(t, size), images, device=device)
        assert torch.equal(plain, found)


@on_devices
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("channels", [1, 3, 8])
def test_adding_patches(device, size, channels):
    torch.manual_seed(0)
    (kh, kw, sh, sw), shape = size, torch.Size((4, 9, 8, channels))
    rows = 4 * places(9, kh, sh) * places(8, kw, sw)
    numbers = kh * kw * channels
    g = torch.randn(rows, numbers + -numbers % 4)
    plain, found = both(lambda t: add_patches(t, shape, size), g, device=device)
    assert torch.allclose(plain, found, atol=1e-5)


@on_devices
@pytest.mark.parametrize("options", [{}, {"padding": 2}, {"stride": (1, 2), "padding": (1, 0)}, {"bias": False}])
def test_convolution(device, options):
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 5, (3, 2), **options)
    x = torch.randn(4, 3, 9, 8)
    g = torch.randn(layer(x).shape)
    expected = derivatives(layer, [x], g, "cpu")
    found = derivatives(ProductConv2d(layer.to(device)), [x], g, device)
    for a, b in zip(expected, found, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


@on_devices
@pytest.mark.parametrize("window", [(2, 2), (2, 3), (1, 4)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_bias_relu_and_pooling(device, window, with_bias):
    torch.manual_seed(0)
    x = torch.randn(6, 7, 9, 5).round()  # with ties
    inputs = [x, torch.randn(3, 5)] if with_bias else [x]

    def pool(x, bias=None):
        return ReluPool.apply(x, bias, window)

    g = torch.randn(pool(*inputs).shape)
    for a, b in zip(derivatives(pool, inputs, g, "cpu"), derivatives(pool, inputs, g, device), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@on_devices
def test_not_a_number_goes_through_pooling(device):
    x = torch.ones(1, 2, 2, 1)
    x[0, 1, 0, 0] = torch.nan
    assert ReluPool.apply(x.to(device), None, (2, 2)).isnan().all()


@on_devices
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("channels", [3, 40])
def test_batchnorm(device, affine, channels):
    """Three clients: a full batch, a padded one, and one with a single sample of one row."""
    torch.manual_seed(0)
    for each in (1, 4):
        x = 3 + 2 * torch.randn(3, 6 * each, channels)
        real = torch.ones(3, 6)
        real[1, 4:], real[2, 1:] = 0, 0
        running = (torch.randn(3, channels), torch.rand(3, channels) + 0.5)
        inputs = [x, torch.randn(3, channels), torch.randn(3, channels)] if affine else [x]

        def normalise(x, weight=None, bias=None, real=real, running=running):
            moved = tuple(t.to(x.device) for t in running)
            return StackedNorm.apply(x, real.to(x.device), weight, bias, moved, 1e-5)[0]

        # Padded rows come out as they may and get no gradient; their own gradients are zero in training.
        rows = real.repeat_interleave(each, 1).unsqueeze(2)
        g = torch.randn(x.shape) * rows
        plain, found = (derivatives(normalise, inputs, g, where) for where in ("cpu", device))
        assert torch.allclose(plain[0] * rows, found[0] * rows, atol=1e-4)
        for a, b in zip(plain[1:], found[1:], strict=True):
            assert torch.allclose(a, b, atol=1e-3)


@on_devices
@pytest.mark.parametrize("classes", [2, 10, 47])
def test_softmax_gradient(device, classes):
    torch.manual_seed(0)
    scores, y, weights = torch.randn(3, classes, 50), torch.randint(0, classes, (3, 50)), torch.rand(3, 50)
    leaf = scores.clone().requires_grad_()
    (expected,) = torch.autograd.grad((F.cross_entropy(leaf, y, reduction="none") * weights).sum(), leaf)
    for order in (scores, scores.transpose(1, 2).contiguous().transpose(1, 2)):
        bias = torch.zeros(3, classes, device=device)
        delta, bias_done = softmax_gradient(order.to(device), y.to(device), weights.to(device), bias)
        assert torch.allclose(delta.cpu(), expected, atol=1e-6)
        if bias_done:
            assert torch.allclose(bias.cpu(), -expected.sum(2), atol=1e-5)
        delta, bias_done = softmax_gradient(order.to(device), y.to(device), weights.to(device), None)
        assert torch.allclose(delta.cpu(), expected, atol=1e-6)
        assert not bias_done


@on_devices
def test_batches_come_in_the_same_order(device):
    keys, lengths = hashed(7, np.arange(5)), np.array([4, 2, 100, 1, 57])
    expected, found = permutations(keys, lengths), permutations_on(torch.device(device), keys, lengths).cpu()
    for row, length in enumerate(lengths):
        assert expected[row, :length].tolist() == found[row, :length].tolist()


@on_devices
def test_hashes_are_the_same(device):
    keys = torch.tensor([3, -7, 2**62])
    for shape in ((), (5,), (4, 3), (2, 3, 4, 5)):
        for key in (keys[0], keys):
            plain, found = both(lambda k, shape=shape: hashed_positions(k, 2, shape), key, device=device)
            assert torch.equal(plain, found)


@on_devices
@pytest.mark.parametrize("layer", [nn.Dropout(0.3), nn.Dropout2d(0.5), nn.AlphaDropout(0.2)])
def test_masks_are_the_same(device, layer):
    x = torch.randn(6, 4, 5, 5)
    results = []
    for where in ("cpu", device):
        with HashedDraws(torch.tensor(11, device=where)):
            results.append(layer(x.to(where)).cpu())
    assert torch.equal(results[0] == 0, results[1] == 0)
    assert torch.allclose(results[0], results[1], atol=1e-6)


@on_devices
def test_numbers_are_the_same(device):
    results = []
    for where in ("cpu", device):
        with HashedDraws(torch.tensor(11, device=where)):
            drawn = [torch.rand(50, device=where), torch.randint(0, 9, (50,), device=where)]
            results.append([*(t.cpu() for t in drawn), torch.randn(50, device=where).cpu()])
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert torch.allclose(results[0][2], results[1][2], atol=1e-6)
