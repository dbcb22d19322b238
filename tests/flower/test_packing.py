"""Models packed for the wire."""

import contextlib
import zlib

import numpy as np
import pytest
import torch

import fedalign as fa
from fedalign.flower.packing import Packing
from fedalign.simulation.engine.layout import Layout

SIZE = 5000


def weights(seed, size=SIZE, dtype=torch.float32):
    return (0.05 * torch.randn(size, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("based", [True, False])
def test_it_is_exact(dtype, compress, based):
    packing = Packing(torch.zeros(SIZE, dtype=dtype), SIZE, compress=compress)
    model = weights(1, dtype=dtype)
    model[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 1.0]).to(dtype)
    base = weights(2, dtype=dtype) if based else None
    back = packing.unpack(packing.pack(model, base), base)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(back.view(kind), model.view(kind))  # also -0 and NaN
    assert back.dtype == dtype


def test_small_differences_are_small():
    packing, base = Packing(torch.zeros(SIZE), SIZE), weights(1)
    sizes = [len(packing.pack(base * (1 + by * weights(2)), base)) for by in (0, 1e-4, 1e-2, 1)]
    assert sizes == sorted(sizes)
    assert sizes[0] < 300
    assert sizes[1] < 0.5 * 4 * SIZE
    assert sizes[3] < 4 * SIZE + 100
    assert len(packing.pack(base, None)) < 0.95 * 4 * SIZE  # the exponents alone


@pytest.mark.parametrize(("transport", "error"), [("bfloat16", 2**-8), ("float16", 2**-10)])
def test_16_bits_are_lossy_and_both_sides_agree(transport, error):
    packing = Packing(torch.zeros(SIZE + 10), SIZE, transport=transport)
    base, change = weights(1, SIZE + 10), 1e-3 * weights(2, SIZE + 10)
    data = packing.pack(base + change, base)
    back = packing.unpack(data, base)
    assert len(data) < 2 * SIZE
    assert torch.equal(back, packing.rounded(base + change, base))
    assert not torch.equal(back[:SIZE], (base + change)[:SIZE])
    assert torch.equal(back[SIZE:], (base + change)[SIZE:])  # statistics are exact
    largest = (change[:SIZE]).abs().max()
    assert (back - base - change)[:SIZE].abs().max() < error * largest + 1e-8


def test_frozen_parameters_do_not_travel():
    module = torch.nn.Sequential(torch.nn.Linear(10, 400), torch.nn.BatchNorm1d(400), torch.nn.Linear(400, 2))
    module[0].requires_grad_(False)
    layout = Layout(module)
    packing = Packing(layout.flatten(module), layout.trainable_size, frozen=4400, compress=False)
    model = packing.initial + 1
    data = packing.pack(model, packing.initial)
    assert len(data) < 4 * (layout.size - 4400) + 100
    back = packing.unpack(data, packing.initial)
    assert torch.equal(back, packing.rounded(model, packing.initial))
    frozen = slice(layout.trainable_size, layout.trainable_size + 4400)
    assert torch.equal(back[frozen], packing.initial[frozen])
    back[frozen] += 1
    assert torch.equal(back, model)


def bomb(planes=4):
    part = zlib.compress(bytes(50_000_000), 9)
    return b"".join(bytes([1]) + len(part).to_bytes(8, "little") + part for _ in range(planes))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"\x02" + data[1:],
        lambda data: data[:1] + (2**60).to_bytes(8, "little") + data[9:],
        lambda data: bytes(20),
        lambda data: bomb(),
    ],
)
def test_damaged_ones_are_refused(change):
    packing, base = Packing(torch.zeros(SIZE), SIZE), weights(1)
    data = packing.pack(base + 1e-3 * weights(2), base)
    with pytest.raises(fa.FedalignError, match="its model"):
        packing.unpack(change(data), base)


def test_noise_never_crashes():
    packing, base = Packing(torch.zeros(SIZE), SIZE), weights(1)
    data, draws = bytearray(packing.pack(base + 1e-3 * weights(2), base)), np.random.default_rng(0)
    for _ in range(300):
        noisy = bytearray(data)
        for at in draws.integers(0, len(data), 3):
            noisy[at] = int(draws.integers(256))
        with contextlib.suppress(fa.FedalignError):
            assert packing.unpack(bytes(noisy), base).shape == (SIZE,)
