"""A whole FedALIGN run written again in NumPy, from SPEC's formulas, and compared with ``simulate``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedalign as fa

ROUNDS, WARMUP, EPOCHS, LR, MU = 30, 3, 2, 1.0, 0.05
SIZES = (50, 20, 35, 80, 15, 41)
PRIORITY = (True, True, False, False, False, False)
NOISE = (0.2, 0.2, 0.0, 0.2, 0.5, 1.0)


def epsilon(t):
    return 0.4 * 0.93**t


def make_data():
    draw = np.random.default_rng(5)
    W = draw.normal(size=(5, 3))
    clients = []
    for n, noise in zip(SIZES, NOISE, strict=True):
        x = draw.normal(size=(n, 5)).astype(np.float32)
        y = (x @ W).argmax(1)
        y = np.where(draw.random(n) < noise, (y + 1) % 3, y)
        cut = n * 4 // 5
        clients.append(((x[:cut], y[:cut]), (x[cut:], y[cut:])))
    return clients


def loss_and_accuracy(W, b, x, y):
    z = x.astype(np.float64) @ W.T + b
    z -= z.max(1, keepdims=True)
    logp = z - np.log(np.exp(z).sum(1, keepdims=True))
    return -logp[np.arange(len(y)), y].mean(), (z.argmax(1) == y).mean()


def local_work(W0, b0, x, y):
    W, b, x = W0.copy(), b0.copy(), x.astype(np.float64)
    for _ in range(EPOCHS):
        z = x @ W.T + b
        z -= z.max(1, keepdims=True)
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        p /= len(y)
        gW, gb = p.T @ x + MU * (W - W0), p.sum(0) + MU * (b - b0)
        W, b = W - LR * gW, b - LR * gb
    return W, b


def oracle(clients, W, b):
    D = np.array([len(train[1]) for train, _ in clients], float)
    p = D / D[np.array(PRIORITY)].sum()
    log = []
    for t in range(ROUNDS):
        F_k = np.array([loss_and_accuracy(W, b, *held)[0] for _, held in clients])
        F = sum(p[k] * F_k[k] for k in range(len(p)) if PRIORITY[k])
        words, models, weights = [], [], []
        for k in range(len(p)):
            if PRIORITY[k]:
                word = "trained"
            elif t < WARMUP:
                word = "absent"
            elif not F_k[k] <= F + epsilon(t):
                word = "declined"
            elif not abs(F_k[k] - F) <= epsilon(t):
                word = "refused"
            else:
                word = "admitted"
            words.append(word)
            if word in ("trained", "admitted"):
                models.append(local_work(W, b, *clients[k][0]))
                weights.append(p[k])
        share = np.array(weights) / np.sum(weights)
        W = sum(s * m[0] for s, m in zip(share, models, strict=True))
        b = sum(s * m[1] for s, m in zip(share, models, strict=True))
        log.append((F, F_k, words))
    return W, b, log


@pytest.mark.parametrize("engine", ["batched", "reference"])
def test_numpy_oracle(engine):
    clients = make_data()
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    W, b, log = oracle(clients, model.weight.detach().double().numpy(), model.bias.detach().double().numpy())
    fed = fa.Federation.from_arrays([c[0] for c in clients], heldout=[c[1] for c in clients], priority=PRIORITY)
    result = fa.simulate(
        fed,
        model,
        fa.Align(epsilon),
        rounds=ROUNDS,
        warmup=WARMUP,
        local=fa.LocalSGD(lr=LR, epochs=EPOCHS, batch_size=None, mu=MU),
        device="cpu",
        engine=engine,
    )
    words = [w for _, _, ws in log for w in ws]
    assert {"admitted", "refused", "declined", "absent"} <= set(words)  # the case exercises every decision
    for (F, F_k, ws), record in zip(log, result.history.rounds, strict=True):
        assert [c.decision for c in record.clients] == ws
        assert record.global_loss == pytest.approx(F, abs=1e-5)
        for c, f in zip(record.clients, F_k, strict=True):
            assert c.loss is None or c.loss == pytest.approx(f, abs=1e-5)
    assert np.abs(result.model.weight.detach().numpy() - W).max() < 1e-5
    assert np.abs(result.model.bias.detach().numpy() - b).max() < 1e-5
