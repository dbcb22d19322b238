"""Personal models of the batched engine equal those of the reference engine, for every method and kind of model."""

from __future__ import annotations

import pytest
import torch
from conftest import federation, flat, linear
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedalign as fa

METHODS = {
    "refine": fa.Refine(epochs=4, patience=2),
    "ditto": fa.Ditto(epochs=4, patience=2, mu=0.5),
    "fedfomo": fa.PersonalFedFomo(epochs=3, candidates=0),
    "local-head": fa.LocalHead(epochs=4, patience=2),
    "scratch": fa.FromScratch(epochs=4, patience=2),
}


def network():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    model.head = "2"
    return model


def normalised():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.ReLU(), nn.Linear(5, 4))
    model.head = "4"
    return model


def simulated(model, methods, engine="batched", rule="all", rounds=2, **options):
    options.setdefault("local", fa.LocalSGD(lr=0.2, epochs=2, batch_size=16))
    return fa.simulate(
        federation(), model, rule=rule, rounds=rounds, personal=methods, engine=engine, device="cpu", **options
    )


def assert_same(first, second):
    assert first.personal.keys() == second.personal.keys()
    for name, outcomes in first.personal.items():
        for one, other in zip(outcomes, second.personal[name], strict=True):
            assert torch.allclose(flat(one.model), flat(other.model), atol=2e-5), name
            assert one.passes == other.passes
            assert one.test.accuracy == pytest.approx(other.test.accuracy, abs=0.021)  # one of 50 samples
            assert one.heldout.loss == pytest.approx(other.heldout.loss, abs=1e-4)


@pytest.mark.parametrize("model", [network, normalised])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_batched_equals_reference(model, method):
    assert_same(*[simulated(model, [method], engine) for engine in ("batched", "reference")])


@pytest.mark.parametrize(
    "local",
    [
        fa.LocalSGD(lr=0.1, epochs=1, momentum=0.9, weight_decay=0.01, clip=1.0),
        fa.LocalAdamW(lr=0.02, steps=3, batch_size=8),
        fa.LocalSGD(lr=0.1, epochs=1, scaffold=True),
        fa.LocalSGD(lr=0.1, epochs=1, mu=1.0, batch_size="full"),
    ],
    ids=["momentum", "adamw", "scaffold", "prox"],
)
def test_batched_equals_reference_with_other_local_work(local):
    methods = [METHODS["refine"], METHODS["ditto"], METHODS["local-head"]]
    assert_same(*[simulated(network, methods, engine, local=local) for engine in ("batched", "reference")])


@given(mu=st.floats(0, 3), epochs=st.integers(1, 4), lr=st.floats(0.01, 0.3), seed=st.integers(0, 99))
@settings(max_examples=8)
def test_batched_equals_reference_for_any_options(mu, epochs, lr, seed):
    methods = [fa.Ditto(epochs=epochs, patience=0, mu=mu, lr=lr), fa.LocalHead(epochs=epochs, patience=0, lr=lr)]
    assert_same(*[simulated(network, methods, engine, rounds=1, seed=seed) for engine in ("batched", "reference")])


def test_a_client_s_bits_do_not_depend_on_who_else_is_worked_on():
    together = simulated(network, list(METHODS.values()))
    for chunk in (1, 3):
        cut = simulated(network, [METHODS["refine"], METHODS["ditto"]], chunk=chunk)
        for name in ("refine", "ditto"):
            for one, other in zip(together.personal[name], cut.personal[name], strict=True):
                assert torch.equal(flat(one.model), flat(other.model))


def test_the_run_itself_is_the_same_with_and_without_personal_models():
    plain, with_personal = simulated(linear, ()), simulated(linear, "refine;ditto")
    assert torch.equal(flat(plain.model), flat(with_personal.model))
    assert plain.history.rounds == with_personal.history.rounds
    assert plain.personal == {}


def test_ditto_lies_between_refinement_and_the_served_model():
    found = simulated(network, [fa.Refine(epochs=6, patience=0)])
    served = flat(found.model)
    free = [flat(one.model) for one in found.personal["refine"]]
    distances = []
    for mu in (0.0, 0.5, 4.0):
        pulled = simulated(network, [fa.Ditto(epochs=6, patience=0, mu=mu)]).personal["ditto"]
        if mu == 0.0:
            assert all(torch.equal(flat(one.model), other) for one, other in zip(pulled, free, strict=True))
        distances.append(sum(float((flat(one.model) - served).norm()) for one in pulled))
    assert distances[0] > distances[1] > distances[2] > 0


def test_a_local_head_leaves_the_body_as_it_was():
    found = simulated(network, [fa.LocalHead(epochs=3, patience=0)])
    served = found.model.state_dict()
    for one in found.personal["local-head"]:
        own = one.model.state_dict()
        assert all(torch.equal(own[name], served[name]) == name.startswith("0") for name in own)


def test_refinement_is_never_worse_on_held_out_data():
    found = simulated(linear, "refine", rule="priority", rounds=5)
    fed = federation()
    for client, one in zip(fed.clients, found.personal["refine"], strict=True):
        x, y = fed.pool.x[client.heldout], fed.pool.y[client.heldout]
        served = nn.functional.cross_entropy(found.model(x), y).item()
        assert one.heldout.loss <= served + 1e-6
    assert any(one.passes > 0 for one in found.personal["refine"])


def test_scratch_depends_on_no_arm():
    first, second = (simulated(linear, "scratch(epochs=5)", rule=rule) for rule in ("all", "priority"))
    for one, other in zip(first.personal["scratch"], second.personal["scratch"], strict=True):
        assert torch.equal(flat(one.model), flat(other.model))


def test_hostile_candidates_get_no_weight():
    """A sign-flipped candidate raises the loss, and one that is not finite is not passed on."""
    honest = simulated(linear, [fa.PersonalFedFomo(epochs=3, candidates=0, senders="priority")])
    for attack in ("sign-flip(scale=50.0)", "not-finite"):
        adversary = fa.Adversary(attack, clients=("2", "3", "4"))
        found = simulated(linear, [fa.PersonalFedFomo(epochs=3, candidates=0)], rule="priority", adversary=adversary)
        usual = simulated(linear, [fa.PersonalFedFomo(epochs=3, candidates=0, senders="priority")], rule="priority")
        for one, other in zip(found.personal["fedfomo"], usual.personal["fedfomo"], strict=True):
            assert one.heldout.loss == pytest.approx(other.heldout.loss, abs=1e-5)
    assert honest.personal["fedfomo"][0].passes > 0


def test_what_cannot_be_personalised_is_refused_before_any_work():
    with pytest.raises(fa.FedalignError, match="this one names none"):
        simulated(linear, "local-head")
    bare = federation(heldout_fraction=0.0)
    with pytest.raises(fa.FedalignError, match="refine needs held-out data of every client, and client '0' has none"):
        fa.simulate(bare, linear, rule="all", rounds=1, personal="refine")
    found = fa.simulate(bare, linear, rule="all", rounds=1, personal="refine(patience=0)")
    assert found.personal["refine"][0].passes == 20
