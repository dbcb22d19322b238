"""Update steps: clipping on the client, and checks on the server that refuse a free client and go on."""

import numpy as np
import pytest
import torch
from by_hand import first_models
from conftest import blobs, federation, linear
from torch import nn

import fedalign as fa
from fedalign.simulation.engine.layout import Layout

LOCAL = fa.LocalSGD(lr=0.05, epochs=2, batch_size=10)
ENGINES = ["batched", "reference"]
NOT_FINITE = "its trained weights are not finite"


def normalised():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))


@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_shortens_an_update_and_keeps_its_direction(engine):
    fed = fa.Federation.from_arrays([blobs(40, 0), blobs(30, 1)], priority=[True, False])
    start, models = first_models(fed, normalised, LOCAL)
    size = Layout(normalised()).trainable_size
    assert size < len(start)  # there are BatchNorm's statistics
    update = (models[0] - start)[:size].double()
    for bound in (0.01, 0.1, float(update.norm()) * 0.5, float(update.norm()) * 2):
        options = {"device": "cpu", "engine": engine, "client_steps": [fa.ClipUpdate(bound)]}
        run = fa.simulate(fed, normalised, fa.PriorityOnly(), 1, 0, LOCAL, **options)
        sent = Layout(run.model).flatten(run.model)
        moved = (sent - start)[:size].double()
        assert moved.norm() <= bound * (1 + 1e-4)
        assert moved.norm() == pytest.approx(min(bound, float(update.norm())), rel=1e-3)
        assert float(moved @ update / moved.norm() / update.norm()) == pytest.approx(1.0, abs=1e-4)
        assert torch.allclose(sent[size:], models[0][size:], atol=1e-6)  # statistics are sent as they are
        assert not torch.equal(sent[size:], start[size:])


def test_steps_run_in_order_and_know_their_client():
    seen = []

    class Note(fa.ClientStep):
        def apply(self, update, context):
            seen.append((context.seed, context.round, context.client, float(update.norm())))
            return update * 3

    fed = fa.Federation.from_arrays([blobs(40, 0), blobs(30, 1)], priority=[True, False])
    fa.simulate(
        fed, normalised, fa.Everyone(), 2, 0, LOCAL, seed=5, device="cpu", client_steps=[fa.ClipUpdate(0.01), Note()]
    )
    assert sorted(one[:3] for one in seen) == [(5, 0, 0), (5, 0, 1), (5, 1, 0), (5, 1, 1)]
    assert all(one[3] == pytest.approx(0.01, rel=1e-3) for one in seen)


RULES = [fa.Everyone(), fa.Align(np.inf), fa.GradientAlign(-1), fa.AutoAlign(), fa.AutoAlign(cosine=None)]


def regression(*scales, inputs=()):
    """Make a regression of two priority clients and free clients whose labels are multiplied.

    ``inputs`` are clients with so large inputs that training is not finite.
    """
    draw = np.random.default_rng(0)
    truth = draw.normal(size=(5, 1))
    clients = []
    for n, scale in zip((40, 30, 36, 28, 20), (1, 1, *scales), strict=False):
        x = draw.normal(size=(n, 5))
        y = x @ truth + 0.1 * draw.normal(size=(n, 1))
        x = x * (1e25 if len(clients) in inputs else 1)
        clients.append((x.astype(np.float32), (y * scale).astype(np.float32)))
    return fa.Federation.from_arrays(clients, priority=[True, True, *[False] * len(scales)])


def run(fed, rule, rounds=3, **options):
    local = fa.LocalSGD(lr=0.01, epochs=2, batch_size=10)
    return fa.simulate(
        fed, lambda: nn.Linear(5, 1), rule, rounds, 0, local, device="cpu", loss=fa.squared_error, **options
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(
    ("wild", "reason"),
    [
        (regression(1, 1, 1e4), "times as long as the longest of the priority"),
        (regression(1, 1, 1, inputs=[4]), NOT_FINITE),
    ],
    ids=["long", "not finite"],
)
def test_a_wild_free_client_is_refused_and_the_round_goes_on(rule, engine, wild, reason):
    """The clients before it have the same numbers with and without it, so the runs must be the same."""
    options = {"engine": engine, "server_steps": [fa.LengthBound(10)]}
    found, without = run(wild, rule, **options), run(regression(1, 1), rule, **options)
    for record, calm in zip(found.history.rounds, without.history.rounds, strict=True):
        assert record.clients[4].decision == "refused"
        assert reason in record.clients[4].reason
        assert record.clients[4].weight == 0.0
        assert [c.decision for c in record.clients[:4]] == [c.decision for c in calm.clients]
        assert [c.weight for c in record.clients[:4]] == pytest.approx([c.weight for c in calm.clients])
        if not isinstance(rule, fa.AutoAlign):
            assert [c.decision for c in calm.clients[2:]] == ["admitted", "admitted"]
    assert torch.allclose(found.model.weight, without.model.weight, atol=1e-6)
    assert torch.allclose(found.model.bias, without.model.bias, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_without_a_bound_only_what_is_not_finite_is_refused(rule):
    record = run(regression(1, 1, 1, inputs=[4]), rule).history[0]
    assert (record.clients[4].decision, record.clients[4].reason) == ("refused", NOT_FINITE)
    long = run(regression(1, 1, 1e4), rule, rounds=1).history[0].clients[4]
    if isinstance(rule, fa.AutoAlign):  # the priority clients do not choose it
        assert long.decision == ("base" if rule.has_training_model else "refused")
    else:
        assert long.decision == "admitted"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_priority_client_that_is_not_finite_ends_the_run(rule):
    fed = regression(1, 1)
    fed.pool.x[fed.clients[1].train] = 1e25
    with pytest.raises(
        fa.DivergedError, match=r"round 0 at client\(s\) 1: the trained weights are not finite"
    ) as error:
        run(fed, rule, server_steps=[fa.LengthBound(10)])
    assert error.value.clients == ("1",)
    assert len(error.value.history) == 0


def test_a_wild_priority_client_is_the_yardstick_and_not_refused():
    fed = regression(1, 1)
    fed.pool.y[fed.clients[1].train] *= 1e4
    record = run(fed, fa.Everyone(), server_steps=[fa.LengthBound(10)]).history[0]
    assert [c.decision for c in record.clients] == ["trained", "trained", "admitted", "admitted"]


def test_a_step_of_ones_own():
    class Never(fa.ServerStep):
        def refuses(self, length, priority_lengths):
            assert length > 0
            assert len(priority_lengths) == 2
            return "never on a Sunday"

    record = run(regression(1, 1), fa.Everyone(), server_steps=[fa.LengthBound(10), Never()]).history[0]
    assert [c.reason for c in record.clients[2:]] == ["never on a Sunday"] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fa.ClipUpdate(0), "the length to clip an update to must be positive, not 0"),
        (lambda: fa.ClipUpdate("long"), "the length to clip an update to must be positive, not 'long'"),
        (lambda: fa.LengthBound(-1), "times must be a positive number, not -1"),
        (
            lambda: run(regression(1), fa.Everyone(), client_steps=[fa.LengthBound(2)]),
            "client_steps must be a fedalign",
        ),
        (lambda: run(regression(1), fa.Everyone(), server_steps=[fa.ClipUpdate(2)]), "server_steps must be a fedalign"),
    ],
)
def test_steps_are_checked(make, message):
    with pytest.raises(fa.FedalignError, match=message):
        make()


@pytest.mark.parametrize("aggregator", ["mean", "median"])
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_what_is_sent_is_checked_not_what_was_trained(factor, aggregator):
    class Spoil(fa.ClientStep):
        def apply(self, update, context):
            return update * factor if context.client == 4 else update

    run = fa.simulate(
        federation(), linear, fa.Everyone(), 2, 0, device="cpu", client_steps=[Spoil()], aggregator=aggregator
    )
    assert [r.clients[4].decision for r in run.history.rounds] == ["refused", "refused"]
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
