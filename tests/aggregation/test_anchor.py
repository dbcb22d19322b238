"""Anchors: trusted clients of a mix bound the other clients' updates, and their statistics count alone."""

import math

import pytest
import torch
from conftest import federation
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedalign as fa
from fedalign.aggregation.aggregator import Aggregation, WeightedMean
from fedalign.protocol.messages import Mix
from fedalign.registry import AGGREGATORS

TRAINABLE, STATISTICS = 5, 3
SEEDS = st.integers(0, 10**6)


def models_of(clients, seed, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    received = torch.randn(TRAINABLE + STATISTICS, generator=draw, dtype=torch.float64)
    moved = {k: received + scale * torch.randn(len(received), generator=draw, dtype=torch.float64) for k in clients}
    return received, moved


def aggregate(mixes, received, models, aggregator=None, order=None):
    total = Aggregation(aggregator or WeightedMean(), mixes, TRAINABLE)
    for k in order or models:
        total.add(k, models[k], received)
    return total.results()


def equal(clients):
    return dict.fromkeys(clients, 1 / len(clients))


@given(priority=st.integers(1, 5), seed=SEEDS, within=st.floats(0.1, 10), far=st.sampled_from([0.1, 1.0, 1e6]))
def test_every_coordinate_of_a_free_update_is_bounded(priority, seed, within, far):
    received, models = models_of(range(priority + 1), seed)
    models[priority] = received + far * (models[priority] - received)
    # A mix in which the free client has nearly all the weight shows what became of its model.
    tiny = 1e-9
    shares = {**dict.fromkeys(range(priority), tiny / priority), priority: 1 - tiny}
    (result,) = aggregate([Mix(shares, anchor=tuple(range(priority)), within=within)], received, models)
    updates = torch.stack([models[k][:TRAINABLE] - received[:TRAINABLE] for k in range(priority)])
    spread = updates.std(0) if priority > 1 else updates[0].abs()
    moved = (result - received)[:TRAINABLE] - updates.mean(0)
    assert (moved.abs() <= within * spread * (1 + 1e-6) + 1e-6).all()


@given(priority=st.integers(1, 5), free=st.integers(0, 3), seed=SEEDS)
def test_statistics_are_those_of_the_priority_clients_own_aggregate(priority, free, seed):
    received, models = models_of(range(priority + free), seed)
    weights = torch.rand(priority + free, generator=torch.Generator().manual_seed(seed)) + 0.1
    shares = {k: float(weights[k] / weights.sum()) for k in models}
    own = {k: float(weights[k] / weights[:priority].sum()) for k in range(priority)}
    anchor = tuple(range(priority))
    for aggregator in (WeightedMean(), AGGREGATORS.accept("aggregator", "norm-clipping")):
        both = aggregate([Mix(own), Mix(shares, anchor=anchor, within=2.0)], received, models, aggregator)
        assert torch.allclose(both[0][TRAINABLE:], both[1][TRAINABLE:], atol=1e-9)


@given(priority=st.integers(1, 4), seed=SEEDS)
def test_trusted_clients_and_those_within_the_bounds_stay_as_they_are(priority, seed):
    received, models = models_of(range(priority), seed)
    anchor = tuple(range(priority))
    plain, bounded = aggregate([Mix(equal(anchor)), Mix(equal(anchor), anchor=anchor, within=1e-3)], received, models)
    assert torch.equal(plain, bounded)
    models[priority] = received + torch.stack([models[k] - received for k in anchor]).mean(0)
    everybody = equal(tuple(models))
    plain, bounded = aggregate([Mix(everybody), Mix(everybody, anchor=anchor, within=0.5)], received, models)
    assert torch.allclose(plain[:TRAINABLE], bounded[:TRAINABLE])


@given(seed=SEEDS, order=st.permutations(range(5)))
def test_the_order_of_arrival_does_not_count(seed, order):
    received, models = models_of(range(5), seed)
    mixes = [Mix(equal((0, 1, k)), {k: 0.5}, anchor=(0, 1), within=1.0) for k in (2, 3, 4)]
    straight, shuffled = (aggregate(mixes, received, models, order=o) for o in (None, order))
    for one, other in zip(straight, shuffled, strict=True):
        assert torch.allclose(one, other)


def test_mixes_with_and_without_an_anchor_do_not_mingle():
    received, models = models_of(range(4), 3, scale=5.0)
    shares = equal(tuple(models))
    mixes = [Mix(shares), Mix(shares, anchor=(0, 1), within=0.1), Mix(shares, anchor=(0, 1, 2), within=0.1)]
    together = aggregate(mixes, received, models)
    for mix, result in zip(mixes, together, strict=True):
        assert torch.equal(aggregate([mix], received, models)[0], result)
    assert not torch.allclose(together[0], together[1])


def test_without_a_limit_only_statistics_are_bounded():
    received, models = models_of(range(3), 4, scale=100.0)
    shares = equal(tuple(models))
    plain, bounded = aggregate([Mix(shares), Mix(shares, anchor=(0, 1), within=math.inf)], received, models)
    assert torch.equal(plain[:TRAINABLE], bounded[:TRAINABLE])
    assert not torch.allclose(plain[TRAINABLE:], bounded[TRAINABLE:])


def test_what_several_mixes_bound_alike_is_held_once():
    held = []

    class Keeps(fa.Aggregator):
        def combine(self, models, shares):
            return models.mean(0)

        def start(self):
            made = super().start()
            held.append(made)
            return made

    received, models = models_of(range(6), 5)
    mixes = [Mix(equal((0, 1, *range(2, size))), anchor=(0, 1), within=1.0) for size in (3, 4, 5, 6)]
    total = Aggregation(Keeps(), mixes, TRAINABLE)
    for k, model in models.items():
        total.add(k, model, received)
    assert len({id(model) for one in held for model in one._models}) == 6


@pytest.mark.parametrize("aggregator", ["median", "krum", "norm-clipping", "trimmed-mean"])
@pytest.mark.parametrize("engine", ["batched", "reference"])
def test_verified_rounds_run_with_robust_aggregators_and_batch_norm(aggregator, engine):
    def normalised():
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 4))

    result = fa.simulate(
        federation(heldout_fraction=0.3), normalised, fa.Verified(), rounds=2, warmup=0, device="cpu",
        aggregator=aggregator, engine=engine, local=fa.LocalSGD(lr=0.1, epochs=1),
    )  # fmt: skip
    assert all(math.isfinite(record.global_loss) for record in result.history.rounds)
