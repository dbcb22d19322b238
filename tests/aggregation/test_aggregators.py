"""Aggregators against the independent library byzfl, in both engines, with AutoALIGN, and users' own."""

import numpy as np
import pytest
import torch
from by_hand import first_models
from conftest import federation, linear
from hypothesis import given
from hypothesis import strategies as st
from independent import as_arrays, load_byzfl

import fedalign as fa
from fedalign.aggregation.aggregator import Aggregation, scaled
from fedalign.protocol.messages import Mix
from fedalign.simulation.engine.layout import Layout

LOCAL = fa.LocalSGD(lr=0.05, epochs=2, batch_size=10)
ENGINES = ["batched", "reference"]


@pytest.fixture
def byzfl(monkeypatch):
    return load_byzfl(monkeypatch)


def aggregators(byzfl, clients):
    """Pair each of our aggregators with byzfl's for a number of clients."""
    return [
        (fa.CoordinateMedian(), byzfl.Median()),
        (fa.TrimmedMean(1), byzfl.TrMean(f=1)),
        (fa.TrimmedMean(2), byzfl.TrMean(f=2)),
        (fa.TrimmedMean(0.2), byzfl.TrMean(f=clients // 5)),
        (fa.WeightedMean(), byzfl.Average()),
    ]


@pytest.mark.parametrize("clients", [5, 6, 9, 10, 17])
def test_they_equal_byzfls_on_random_vectors(byzfl, clients):
    draw = torch.Generator().manual_seed(clients)
    models = torch.randn(clients, 400, generator=draw) * torch.rand(clients, 1, generator=draw) * 3
    shares = torch.full((clients,), 1 / clients)
    for ours, theirs in aggregators(byzfl, clients):
        expected = torch.from_numpy(np.asarray(theirs(as_arrays(models))))
        assert torch.allclose(ours.combine(models, shares).double(), expected, atol=1e-6), ours


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_they_equal_byzfls_in_a_simulation(byzfl, engine):
    fed = federation(sizes=(30, 30, 30, 30, 30))
    _, models = first_models(fed, linear, LOCAL)
    for ours, theirs in aggregators(byzfl, 5):
        run = fa.simulate(fed, linear, fa.Everyone(), 1, 0, LOCAL, device="cpu", engine=engine, aggregator=ours)
        expected = torch.from_numpy(np.asarray(theirs(as_arrays(models))))
        found = Layout(run.model).flatten(run.model).double()
        assert torch.allclose(found, expected, atol=1e-6), ours


@pytest.mark.parametrize("engine", ENGINES)
def test_only_admitted_clients_are_in_a_median(byzfl, engine):
    fed = federation()
    _, models = first_models(fed, linear, LOCAL)
    options = {"device": "cpu", "engine": engine, "aggregator": fa.CoordinateMedian()}
    run = fa.simulate(fed, linear, fa.Align(0.3), 1, 0, LOCAL, **options)
    taken = [c.id for c in run.history[0].clients if c.decision in ("trained", "admitted")]
    assert 2 < len(taken) < 5
    expected = torch.from_numpy(byzfl.Median()(as_arrays([models[k] for k in taken])))
    assert torch.allclose(Layout(run.model).flatten(run.model).double(), expected, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_autoalign_with_a_median(byzfl, engine):
    fed, done = federation(), []
    _, models = first_models(fed, linear, LOCAL)
    options = {"device": "cpu", "engine": engine, "aggregator": fa.CoordinateMedian(), "on_round": done.append}
    run = fa.simulate(fed, linear, fa.AutoAlign(), 1, 0, LOCAL, **options)
    record, tensors = run.history[0], done[0].snapshot.tensors

    def median(clients):
        return torch.from_numpy(byzfl.Median()(as_arrays([models[k] for k in clients])))

    served = [c.id for c in record.clients if c.decision in ("trained", "admitted")]
    assert torch.allclose(tensors["model"].double(), median(served), atol=1e-6)
    assert torch.allclose(tensors["priority_only"].double(), median((0, 1)), atol=1e-6)
    if record.base:  # a client of the training model may be admitted as well, so the sets are compared by the model
        base = {c.id for c in record.clients if c.decision == "base"}
        wider = [sorted({0, 1} | base | set(extra)) for extra in ((), served)]
        assert any(torch.allclose(tensors["training"].double(), median(one), atol=1e-6) for one in wider)
    longer = fa.simulate(fed, linear, fa.AutoAlign(), 6, 0, LOCAL, **{**options, "on_round": None})
    assert longer.history[-1].test_accuracy > run.history[0].test_accuracy


@given(st.integers(1, 7), st.integers(0, 1000))
def test_streaming_equals_combining(clients, seed):
    draw = torch.Generator().manual_seed(seed)
    models = torch.randn(clients, 30, generator=draw)
    shares = torch.rand(clients, generator=draw) + 0.1
    shares /= shares.sum()
    for aggregator in (fa.WeightedMean(), fa.CoordinateMedian(), fa.TrimmedMean(0.2), fa.TrimmedMean(1)):
        part = aggregator.start()
        for model, share in zip(models, shares.tolist(), strict=True):
            part.add(model, share)
        assert torch.allclose(part.result(), aggregator.combine(models, shares), atol=1e-6), aggregator


@given(st.integers(3, 9), st.integers(0, 1000))
def test_a_minority_moves_no_coordinate_beyond_the_others(clients, seed):
    draw = torch.Generator().manual_seed(seed)
    models = torch.randn(clients, 20, generator=draw)
    hostile = (clients - 1) // 2
    models[:hostile] = torch.randn(hostile, 20, generator=draw) * 1e6
    honest = models[hostile:]
    for aggregator in (fa.CoordinateMedian(), fa.TrimmedMean(hostile)):
        found = aggregator.combine(models, torch.full((clients,), 1 / clients))
        assert (found >= honest.amin(0) - 1e-6).all()
        assert (found <= honest.amax(0) + 1e-6).all()


def test_a_hostile_client_spoils_the_mean_and_not_the_median():
    fed = federation(shifts=(0.1, 0.1, 0.1, 0.1, 0.1))

    class Hostile(fa.ClientStep):
        def apply(self, update, context):
            return update * -50 if context.client == 4 else update

    def lost(aggregator):
        """Give the test accuracy that the hostile client costs."""
        calm, spoiled = (
            fa.simulate(
                fed, linear, fa.Everyone(), 15, 0, LOCAL, device="cpu", aggregator=aggregator, client_steps=steps
            )
            for steps in ((), (Hostile(),))
        )
        return calm.history[-1].test_accuracy - spoiled.history[-1].test_accuracy

    assert lost(fa.WeightedMean()) > 0.5
    assert lost(fa.CoordinateMedian()) < 0.05
    assert lost(fa.TrimmedMean(1)) < 0.05


class Largest(fa.Aggregator):
    """The largest value of every coordinate: a user's own aggregator of a few lines."""

    def combine(self, models, shares):
        assert shares.sum() == pytest.approx(1.0)
        return models.max(0).values


@pytest.mark.parametrize("engine", ENGINES)
def test_an_aggregator_of_ones_own(engine):
    fed = federation()
    _, models = first_models(fed, linear, LOCAL)
    run = fa.simulate(fed, linear, fa.Everyone(), 1, 0, LOCAL, device="cpu", engine=engine, aggregator=Largest())
    expected = torch.stack(models).max(0).values
    assert torch.allclose(Layout(run.model).flatten(run.model), expected, atol=1e-6)
    with pytest.raises(fa.FedalignError, match=r"aggregator must be a fedalign\.Aggregator object, not 3"):
        fa.simulate(fed, linear, aggregator=3, device="cpu")


def test_a_step_scales_an_update_and_leaves_statistics():
    received, model = torch.tensor([1.0, 2.0, 7.0]), torch.tensor([3.0, 5.0, 9.0])
    assert scaled(model, received, 0.5, size=2).tolist() == [2.0, 3.5, 9.0]
    assert scaled(model, received, 1.0, size=2) is model
    aggregation = Aggregation(fa.WeightedMean(), [Mix({0: 0.5, 1: 0.5}, {1: 0.5}), Mix({1: 1.0})], size=2)
    aggregation.add(0, received, received)
    aggregation.add(1, model, received)
    assert [one.tolist() for one in aggregation.results()] == [[1.5, 2.75, 8.0], [3.0, 5.0, 9.0]]


@pytest.mark.parametrize("trim", [-0.1, 0.5, 1.5, True, "much"])
def test_trims_are_checked(trim):
    with pytest.raises(fa.FedalignError, match=r"trim must be a fraction below 0\.5, or a whole number of clients"):
        fa.TrimmedMean(trim)
