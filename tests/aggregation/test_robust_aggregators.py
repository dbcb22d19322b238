"""Robust aggregators against byzfl, their bounds under attack, statistics, few clients, and both engines."""

import itertools

import numpy as np
import pytest
import torch
from by_hand import first_models
from conftest import blobs, federation, linear
from hypothesis import given
from hypothesis import strategies as st
from independent import as_arrays, load_byzfl
from torch import nn

import fedalign as fa
from fedalign.aggregation.aggregator import Aggregation
from fedalign.protocol.messages import Mix
from fedalign.registry import AGGREGATORS
from fedalign.simulation.engine.layout import Layout

LOCAL = fa.LocalSGD(lr=0.05, epochs=2, batch_size=10)
ENGINES = ["batched", "reference"]
NAMES = ["geometric-median", "krum", "multi-krum", "centred-clipping", "norm-clipping", "nnm", "bucketing"]
SETTINGS = [*NAMES, "norm-clipping(length=0.3)", "nnm(f=1, then='krum(f=1)')", "bucketing(then='centred-clipping')"]


@pytest.fixture
def byzfl(monkeypatch):
    return load_byzfl(monkeypatch)


def normalised():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))


def made(setting):
    return AGGREGATORS.accept("aggregator", setting)


def vectors_of(clients, numbers, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(clients, numbers, generator=draw) * (0.2 + torch.rand(clients, 1, generator=draw))


def equal_shares(clients):
    return torch.full((clients,), 1 / clients)


def aggregated(aggregator, models, received, size, order=None, **options):
    """Aggregate models with equal shares, added in some order."""
    clients = range(len(models))
    aggregation = Aggregation(aggregator, [Mix(dict.fromkeys(clients, 1 / len(models)))], size, **options)
    for k in clients if order is None else order:
        aggregation.add(k, models[k], received)
    return aggregation.results()[0]


def pairs(byzfl, f):
    """Pair each of our aggregators with byzfl's for f hostile clients."""

    def then(first, second):
        return lambda vectors: second(first(vectors))

    def clipped(vectors):
        return byzfl.Average()(byzfl.Clipping(c=1.5)(vectors.copy()))

    def median_clipped(vectors):
        length = float(np.sort(np.linalg.norm(vectors, axis=1))[(len(vectors) - 1) // 2])
        return byzfl.Average()(byzfl.Clipping(c=length)(vectors.copy()))

    return [
        (fa.GeometricMedian(steps=3, smoothing=0.1), byzfl.GeometricMedian(nu=0.1, T=3)),
        (fa.GeometricMedian(steps=1, smoothing=1.0), byzfl.GeometricMedian(nu=1.0, T=1)),
        (fa.GeometricMedian(steps=10), byzfl.GeometricMedian(nu=1e-6, T=10)),
        (fa.Krum(f), byzfl.Krum(f)),
        (fa.MultiKrum(f), byzfl.MultiKrum(f)),
        (fa.CentredClipping(length=2.0, steps=1), byzfl.CenteredClipping(L=1, tau=2.0)),
        (fa.CentredClipping(length=0.7, steps=4), byzfl.CenteredClipping(L=4, tau=0.7)),
        (fa.NormClipping(length=1.5), clipped),
        (fa.NormClipping(), median_clipped),
        (fa.NearestNeighbourMixing(f), then(byzfl.NNM(f), byzfl.TrMean(f))),
        (fa.NearestNeighbourMixing(f, then="mean"), then(byzfl.NNM(f), byzfl.Average())),
        (fa.NearestNeighbourMixing(f, then=f"krum(f={f})"), then(byzfl.NNM(f), byzfl.Krum(f))),
        (fa.NearestNeighbourMixing(f, then="median"), then(byzfl.NNM(f), byzfl.Median())),
    ]


@pytest.mark.parametrize("numbers", [1, 3, 400, 70_000])
@pytest.mark.parametrize(("clients", "f"), [(4, 1), (5, 1), (9, 0), (9, 2), (10, 4), (17, 8)])
def test_they_equal_byzfls_on_random_vectors(byzfl, clients, f, numbers):
    vectors = vectors_of(clients, numbers, seed=clients + numbers).double()
    for ours, theirs in pairs(byzfl, f):
        expected = torch.from_numpy(np.asarray(theirs(as_arrays(vectors))))
        found = ours.combine(vectors, equal_shares(clients).double())
        assert torch.allclose(found, expected, rtol=0, atol=1e-6), ours


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_they_equal_byzfls_on_updates_of_models(byzfl, precision, offset):
    """The aggregate of models is the received model plus what byzfl makes of the updates."""
    vectors = vectors_of(11, 200).to(precision)
    received = torch.full((200,), offset, dtype=precision)
    for ours, theirs in pairs(byzfl, f=3):
        found = aggregated(ours, received + vectors, received, size=200) - received
        expected = torch.from_numpy(np.asarray(theirs(as_arrays(vectors))))
        assert torch.allclose(found.double(), expected, rtol=0, atol=1e-6), ours


@pytest.mark.parametrize(("clients", "size"), [(9, 2), (10, 3), (5, 1), (7, 9)])
def test_bucketing_equals_byzfls_in_the_same_order(byzfl, monkeypatch, clients, size):
    vectors = vectors_of(clients, 50).double()
    context = fa.AggregateContext(50, torch.zeros(50), tuple(range(clients)), seed=3, round=2)
    order = list(itertools.chain(*fa.Bucketing(size).buckets(context)))
    assert sorted(order) == list(range(clients))
    monkeypatch.setattr(np.random, "permutation", lambda rows: rows[order])
    means = byzfl.Bucketing(s=size)(as_arrays(vectors))
    for ours, theirs in ((fa.Bucketing(size, then="mean"), byzfl.Average()), (fa.Bucketing(size), byzfl.TrMean(0))):
        if isinstance(theirs, byzfl.TrMean):
            theirs = byzfl.TrMean(min(clients // 5, (len(means) - 1) // 2))
        found = ours.combine_in(vectors, equal_shares(clients), context)
        assert torch.allclose(found, torch.from_numpy(np.asarray(theirs(means))), rtol=0, atol=1e-6)


def test_buckets_are_drawn_by_seed_and_round_and_client():
    def drawn(seed, round, clients=tuple(range(12))):
        context = fa.AggregateContext(1, torch.zeros(1), clients, seed, round)
        return [{clients[row] for row in rows} for rows in fa.Bucketing(size=3).buckets(context)]

    assert drawn(0, 0) == drawn(0, 0) == drawn(0, 0, tuple(reversed(range(12))))
    assert len({str(drawn(seed, round)) for seed in range(3) for round in range(3)}) == 9


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_they_equal_byzfls_in_a_simulation(byzfl, engine):
    fed = federation(sizes=(30, 30, 30, 30, 30))
    start, models = first_models(fed, linear, LOCAL)
    updates = [model - start for model in models]
    for ours, theirs in pairs(byzfl, f=1):
        run = fa.simulate(fed, linear, fa.Everyone(), 1, 0, LOCAL, device="cpu", engine=engine, aggregator=ours)
        expected = torch.from_numpy(np.asarray(theirs(as_arrays(updates))))
        found = (Layout(run.model).flatten(run.model) - start).double()
        assert torch.allclose(found, expected, atol=1e-6), ours


@given(st.sampled_from(SETTINGS), st.integers(4, 9), st.integers(0, 1000))
def test_the_order_of_arrival_does_not_count(setting, clients, seed):
    models, received = vectors_of(clients, 12, seed), vectors_of(1, 12, seed + 1)[0]
    order = np.random.default_rng(seed).permutation(clients).tolist()
    first, second = (aggregated(made(setting), models, received, 9, by, seed=seed) for by in (None, order))
    assert torch.allclose(first, second, rtol=0, atol=1e-6)
    if setting != "norm-clipping(length=0.3)":  # the others hold the models, and sort them
        assert torch.equal(first, second)


@given(st.sampled_from([name for name in SETTINGS if "bucketing" not in name]), st.integers(5, 9), st.integers(0, 1000))
def test_the_numbers_of_clients_do_not_count(setting, clients, seed):
    models, received = vectors_of(clients, 9, seed).double(), torch.zeros(9).double()
    order = np.random.default_rng(seed).permutation(clients).tolist()
    first, second = (aggregated(made(setting), rows, received, 9) for rows in (models, models[order]))
    assert torch.allclose(first, second)


@given(st.sampled_from(SETTINGS), st.integers(4, 9), st.integers(0, 1000))
def test_all_models_moved_move_the_aggregate(setting, clients, seed):
    models, received = vectors_of(clients, 12, seed).double(), vectors_of(1, 12, seed + 1)[0].double()
    shift = vectors_of(1, 12, seed + 2)[0].double() * 50
    here = aggregated(made(setting), models, received, 9)
    there = aggregated(made(setting), models + shift, received + shift, 9)
    assert torch.allclose(here + shift, there, rtol=0, atol=1e-9)


@given(st.integers(2, 4), st.integers(0, 1000), st.sampled_from([1.0, 30.0, 1e6, 1e30]))
def test_a_minority_cannot_move_the_aggregate_far(f, seed, scale):
    clients = 4 * f + 3  # so that buckets of two outnumber the hostile clients by more than two
    models = vectors_of(clients, 20, seed)
    models[:f] = models[:f] * scale + scale
    honest = models[f:]
    diameter, centre = float(torch.cdist(honest, honest).max()), honest.mean(0)
    longest = float(honest.norm(dim=1).max())

    def distance(aggregator):
        found = aggregated(aggregator, models, torch.zeros(20), 20, seed=seed)
        return float((found - centre).double().norm())

    assert distance(fa.Krum(f)) <= diameter * (clients**0.5 + 1)
    assert distance(fa.MultiKrum(f)) <= diameter * (clients**0.5 + 1)
    assert distance(fa.GeometricMedian(steps=50)) <= 2 * (clients - f) / (clients - 2 * f) * diameter
    assert distance(fa.NearestNeighbourMixing(f)) <= 2 * diameter * 20**0.5
    assert distance(fa.Bucketing(2, f)) <= diameter * 20**0.5
    assert distance(fa.NormClipping()) <= 2 * longest
    assert distance(fa.NormClipping(length=longest)) <= 2 * longest
    assert distance(fa.CentredClipping(steps=1)) <= 2 * longest
    assert distance(fa.CentredClipping(length=longest, steps=3)) <= 4 * longest
    assert scale < 1e6 or distance(fa.WeightedMean()) > 1e3 * diameter


@pytest.mark.parametrize("setting", SETTINGS)
def test_statistics_do_not_count_in_distances_and_lengths(setting):
    """The trainable part of an aggregate is the same whatever the statistics behind it are."""
    models, received = vectors_of(7, 10), vectors_of(1, 10, seed=1)[0]
    plain = aggregated(made(setting), models, received, size=8)
    counters = models.clone()
    counters[:, 8:] = torch.arange(7)[:, None] * 1e5
    found = aggregated(made(setting), counters, received, size=8)
    assert torch.equal(found[:8], plain[:8])
    assert (found[8:] >= 0).all()
    assert (found[8:] <= 6e5).all()
    same = models.clone()
    same[:, 8:] = 40.0
    assert torch.allclose(aggregated(made(setting), same, received, size=8)[8:], torch.full((2,), 40.0))


def test_chosen_clients_bring_their_own_statistics():
    models = torch.tensor([[1.0, 7.0], [2.0, 8.0], [1000.0, 9.0], [2.5, 10.0]])
    assert aggregated(fa.Krum(1), models, torch.zeros(2), size=1).tolist() == [2.0, 8.0]
    found = aggregated(fa.MultiKrum(1), models, torch.zeros(2), size=1)
    assert found.tolist() == pytest.approx([5.5 / 3, 25 / 3])
    clipped = aggregated(fa.NormClipping(length=2.0), models, torch.zeros(2), size=1)
    assert clipped.tolist() == pytest.approx([7 / 4, 34 / 4])


def test_norm_clipping_of_a_fixed_length_holds_no_update():
    assert fa.NormClipping(length=1.0).streams
    assert not fa.NormClipping().streams
    models, received = vectors_of(9, 30), vectors_of(1, 30, seed=1)[0]
    shares = torch.arange(1.0, 10.0) / 45
    mix = Mix({k: float(share) for k, share in enumerate(shares)})
    aggregation = Aggregation(fa.NormClipping(length=1.0), [mix], size=25)
    for k, model in enumerate(models):
        aggregation.add(k, model, received)
    held = fa.Aggregator.combine_in(
        fa.NormClipping(length=1.0), models, shares, fa.AggregateContext(25, received, tuple(range(9)))
    )
    assert torch.allclose(aggregation.results()[0], held, atol=1e-6)
    assert torch.allclose(held[25:], shares @ models[:, 25:], atol=1e-6)
    far = aggregated(fa.NormClipping(length=1e9), models, received, size=25)
    assert torch.allclose(far, aggregated(fa.WeightedMean(), models, received, size=25), atol=1e-5)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("clients", [1, 2, 3])
def test_few_clients(setting, clients):
    models, received = vectors_of(clients, 10), torch.zeros(10)
    found = aggregated(made(setting), models, received, size=8)
    assert torch.isfinite(found).all()
    if clients == 1 and setting != "norm-clipping(length=0.3)":
        assert torch.allclose(found, models[0], atol=1e-6)
    same = aggregated(made(setting), models[:1].repeat(clients, 1), models[0], size=8)
    assert torch.allclose(same, models[0], atol=1e-6)


def test_more_hostile_clients_than_a_minority_count_as_one():
    models = vectors_of(5, 20)
    for kind in (fa.Krum, fa.MultiKrum, fa.NearestNeighbourMixing):
        assert torch.equal(*(kind(f).combine(models, equal_shares(5)) for f in (2, 40))), kind
    median = fa.CoordinateMedian().combine(models, equal_shares(5))
    assert torch.equal(fa.Bucketing(size=1, f=40).combine(models, equal_shares(5)), median)


@pytest.mark.parametrize("make", [linear, normalised])
@pytest.mark.parametrize("setting", SETTINGS)
def test_both_engines_agree(setting, make):
    fed, found = federation(), []
    for engine in ENGINES:
        run = fa.simulate(fed, make, fa.Align(1.0), 3, 0, LOCAL, device="cpu", engine=engine, aggregator=setting)
        assert sum(record.admitted for record in run.history.rounds) > 2
        found.append(Layout(run.model).flatten(run.model))
    assert torch.allclose(*found, atol=1e-4)


@pytest.mark.parametrize("setting", SETTINGS)
def test_autoalign_runs_with_them(setting):
    run = fa.simulate(federation(), linear, fa.AutoAlign(), 6, 0, LOCAL, device="cpu", aggregator=setting)
    assert run.history[5].test_accuracy > run.history[0].test_accuracy


@pytest.mark.parametrize(
    "setting",
    ["geometric-median", "krum(f=1)", "multi-krum(f=1)", "centred-clipping", "nnm(f=1)", "bucketing(size=1, f=1)"],
)
def test_a_hostile_client_does_little(setting):
    fed = federation(shifts=(0.1, 0.1, 0.1, 0.1, 0.1))

    class Hostile(fa.ClientStep):
        def apply(self, update, context):
            return update * -50 if context.client == 4 else update

    calm, spoiled = (
        fa.simulate(
            fed, linear, fa.Everyone(), 15, 0, LOCAL, device="cpu", aggregator=setting, client_steps=steps
        ).history[-1]
        for steps in ((), (Hostile(),))
    )
    assert calm.test_accuracy - spoiled.test_accuracy < 0.1


class Doubled(fa.Aggregator):
    """A user's own aggregator of updates."""

    on_updates = True

    def combine(self, models, shares):
        assert models.shape[1] == Layout(normalised()).trainable_size
        return 2 * (models * shares[:, None]).sum(0)


def test_an_aggregator_of_ones_own_on_updates():
    fed = fa.Federation.from_arrays([blobs(30, 0), blobs(30, 1)], priority=[True, False])
    start, models = first_models(fed, normalised, LOCAL)
    size = Layout(normalised()).trainable_size
    run = fa.simulate(fed, normalised, fa.Everyone(), 1, 0, LOCAL, device="cpu", aggregator=Doubled())
    found, mean = Layout(run.model).flatten(run.model), torch.stack(models).mean(0)
    assert torch.allclose(found[:size], start[:size] + 2 * (mean - start)[:size], atol=1e-5)
    assert torch.allclose(found[size:], mean[size:], atol=1e-5)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(3), r"Own\.combine must return \(2,\) of torch.float32, not \(3,\) of torch.float32"),
        (torch.tensor([1.0, torch.nan]), r"Own\.combine returned numbers that are not finite"),
        (None, r"Own\.combine must return \(2,\) of torch.float32, not NoneType"),
    ],
)
def test_a_wrong_update_is_an_error(result, message):
    class Own(fa.Aggregator):
        on_updates = True

        def combine(self, models, shares):
            return result

    for aggregator in (Own(), fa.Bucketing(then=Own())):
        with pytest.raises(fa.FedalignError, match=message):
            aggregated(aggregator, torch.zeros(4, 3), torch.zeros(3), size=2)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("krum(f=0.5)", r"f must be a fraction below 0\.5, or a whole number of clients, not 0\.5"),
        ("multi-krum(f=1.5)", r"f must be a fraction below 0\.5"),
        ("nnm(f=-1)", r"f must be a fraction below 0\.5"),
        ("nnm(f=inf)", r"f must be a fraction below 0\.5"),
        ("nnm(then='medan')", "then is 'medan'; did you mean 'median'"),
        ("bucketing(then='krum(g=2)')", "unknown key then.g"),
        ("bucketing(size=0)", "the size of a bucket must be a whole number, 1 or more, not 0"),
        ("norm-clipping(length=0.0)", "the length to clip an update to must be positive, not 0.0"),
        ("centred-clipping(length=-1.0)", r"the length to clip an update to must be positive, not -1\.0"),
        ("centred-clipping(steps=0)", "steps must be a whole number, 1 or more, not 0"),
        ("geometric-median(steps=0)", "steps must be a whole number, 1 or more, not 0"),
        ("geometric-median(smoothing=0.0)", r"smoothing must be a positive length, not 0\.0"),
    ],
)
def test_options_are_checked(setting, message):
    with pytest.raises(fa.FedalignError, match=message):
        made(setting)


def test_what_follows_is_an_aggregator():
    with pytest.raises(fa.FedalignError, match=r"then must be a fedalign\.Aggregator object or its name, not 3"):
        fa.NearestNeighbourMixing(then=3)
    assert fa.Bucketing(then=fa.Krum(1)) == made("bucketing(then='krum(f=1)')")
    assert fa.Bucketing(then={"kind": "krum", "f": 1}) == fa.Bucketing(then="krum(f=1)")
