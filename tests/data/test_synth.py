from __future__ import annotations

import numpy as np
import pytest
import torch

import fedalign as fa
from fedalign.data.synth import Synth


def rows(fed, k, split):
    r = fed.clients[k].rows(split)
    return fed.pool.x[r].numpy(), fed.pool.y[r].numpy()


def test_counts_and_roles():
    fed = Synth(priority=3, free=4, samples=100, test_samples=30, label_skew=1.0, random_skew=1.0).federation(0)
    assert fed.roster.priority == (True,) * 3 + (False,) * 4
    assert [len(c.train) for c in fed.clients[:3]] == [80] * 3
    assert [len(c.heldout) for c in fed.clients[:3]] == [20] * 3
    # Free client j has 100 samples and 100·(j + ½)/4 irrelevant ones.
    assert [len(c.train) + len(c.heldout) for c in fed.clients[3:]] == [112, 138, 162, 188]
    assert [len(c.test) for c in fed.clients[:3]] == [30] * 3


def test_the_first_free_client_is_nearly_clean_the_last_is_noisy():
    fed = Synth(priority=3, free=10, samples=200, random_fraction=0.0).federation(1)
    known = {x.tobytes(): int(y) for k in range(3) for x, y in zip(*rows(fed, k, "train"), strict=True)}

    def wrong(k):
        x, y = rows(fed, k, "train")
        return np.mean([known[a.tobytes()] != b for a, b in zip(x, y, strict=True)])

    shares = [wrong(k) for k in range(3, 13)]
    assert shares[0] == 0.0  # ±0.34 rounds to no shift
    assert 0.6 < shares[-1] < 0.9
    assert shares[4] < shares[9]


def test_nothing_held_out_or_tested_is_trained_on():
    fed = Synth(priority=3, free=3, samples=100).federation(0)
    secret = {x.tobytes() for k in range(6) for s in ("heldout", "test") for x in rows(fed, k, s)[0]}
    seen = {x.tobytes() for k in range(6) for x in rows(fed, k, "train")[0]}
    assert not secret & seen


def test_features_have_the_variances_of_the_generator():
    fed = Synth(priority=1, free=0, samples=4000, test_samples=0, heldout_fraction=0.0).federation
    with pytest.warns(fa.FederationWarning):
        x, _ = rows(fed(3), 0, "train")
    expected = np.arange(1, 61) ** -1.2
    assert np.allclose(x.var(0), expected, rtol=0.12)


def test_labels_are_the_clients_own_linear_model():
    with pytest.warns(fa.FederationWarning):
        fed = Synth(priority=1, free=0, samples=3000).federation(0)
    result = fa.simulate(fed, lambda: torch.nn.Linear(60, 10), rounds=60, local=fa.LocalSGD(0.1, epochs=2))
    commonest = np.bincount(rows(fed, 0, "test")[1]).max() / 500
    assert commonest < 0.5
    assert result.history[-1].test_accuracy > 0.8


def test_a_seed_fixes_everything():
    first, second, third = (Synth(samples=50).federation(s) for s in (0, 0, 1))
    assert first.pool.x.equal(second.pool.x)
    assert not first.pool.x.equal(third.pool.x)


def test_levels_are_as_specified():
    synth = Synth(free=10, label_noise=2.5, label_skew=0.5, random_fraction=0.8, random_skew=5.0)
    for j in range(10):
        assert synth.noise(j) == pytest.approx((2.5 * ((j + 0.5) / 10) ** 2, 0.8 * ((j + 0.5) / 10) ** 0.2))


def test_tasks_are_drawn_as_specified():
    tasks = [Synth(alpha=3.0, beta=5.0).task(0, k) for k in range(300)]
    u = np.array([W.mean() for W, _, _ in tasks])  # near u_k: 600 draws around it
    assert u.std() == pytest.approx(3.0, rel=0.12)
    assert np.std([b.mean() - m for (_, b, _), m in zip(tasks, u, strict=True)]) == pytest.approx(10**-0.5, rel=0.15)
    assert np.mean([W.std() for W, _, _ in tasks]) == pytest.approx(1.0, rel=0.02)
    assert np.std([v.mean() for _, _, v in tasks]) == pytest.approx(5.0, rel=0.12)
    assert np.mean([v.std() for _, _, v in tasks]) == pytest.approx(1.0, rel=0.05)


def test_matching_data_of_free_clients_is_unseen_too():
    fed = Synth(priority=3, free=3, samples=100, random_fraction=0.0, label_noise=0.0).federation(0)
    held = {x.tobytes() for k in range(3) for x in rows(fed, k, "heldout")[0]}
    trained = {x.tobytes() for k in range(6) for x in rows(fed, k, "train")[0]}
    for k in range(3, 6):
        mine = {x.tobytes() for x in rows(fed, k, "heldout")[0]}
        assert mine <= held
        assert not mine & trained


def test_lognormal_sizes():
    sizes = [len(c.train) for c in Synth(samples=50, sizes="lognormal").federation(0).clients[:10]]
    assert min(sizes) >= 40
    assert min(sizes) < 120
    assert len(set(sizes)) > 5


@pytest.mark.parametrize(
    "options",
    [{"priority": 0}, {"samples": 0}, {"free": -1}, {"label_skew": 0}, {"sizes": "odd"}, {"heldout_fraction": 1.0},
     {"alpha": float("nan")}],
)  # fmt: skip
def test_bad_settings(options):
    with pytest.raises(fa.FedalignError):
        Synth(**options)
