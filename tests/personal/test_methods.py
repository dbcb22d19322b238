"""Personal methods with made-up replies: which passes they do, when they stop, and what they return."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedalign as fa
from fedalign.personal.fedfomo import mixed, weights
from fedalign.personal.local_work import PersonalLocal
from fedalign.personal.method import Exchange, Measured, Start, Train, head_of, parts_of
from fedalign.personal.settings import as_methods, resolve_personal

START = Start(served=0, initial=-100, client=3, seed=7, head="1")


def play(method, losses, start=START):
    """Answer a client whose pass n gives the model n, with the given held-out losses by model."""
    run, reply, trained = method.personalise(start), None, []
    while True:
        try:
            request = run.send(reply)
        except StopIteration as stop:
            return stop.value, trained
        if isinstance(request, Train):
            trained.append(request)
            reply = request.number + 1 if request.number + 1 in losses else None
        else:
            assert isinstance(request, Measured)
            assert request.split == "heldout"
            reply = [fa.Measure(losses[model], None, 10) for model in request.models]


@given(
    st.lists(st.floats(0, 10), min_size=2, max_size=15),
    st.integers(1, 14),
    st.integers(1, 6),
    st.sampled_from([fa.Refine, fa.Ditto, fa.LocalHead]),
)
def test_the_best_pass_counts_and_patience_ends_the_passes(losses, epochs, patience, kind):
    epochs = min(epochs, len(losses) - 1)
    found, trained = play(kind(epochs=epochs, patience=patience), dict(enumerate(losses)))
    seen = losses[: len(trained) + 1]
    assert found.model == found.passes == seen.index(min(seen))  # the first of the lowest, the served model included
    assert len(trained) == min(epochs, found.passes + patience)


def test_without_patience_nothing_is_measured_and_all_passes_are_done():
    found, trained = play(fa.Refine(epochs=4, patience=0), dict.fromkeys(range(5)))
    assert (found.model, found.passes, len(trained)) == (4, 4, 4)


def test_a_model_that_is_not_finite_ends_the_passes():
    found, trained = play(fa.Refine(epochs=9), {0: 2.0, 1: 1.0, 2: 3.0})
    assert (found.model, len(trained)) == (1, 3)
    assert play(fa.Refine(epochs=3, patience=2), {0: math.nan, 1: math.nan, 2: 5.0, 3: 6.0})[0].model == 2


def test_what_each_method_asks_for():
    ditto = play(fa.Ditto(mu=0.5, lr=0.2), {0: 1.0, 1: 0.5})[1][0]
    assert (ditto.mu, ditto.towards, ditto.lr, ditto.only) == (0.5, 0, 0.2, "")
    assert play(fa.LocalHead(), {0: 1.0, 1: 0.5})[1][0].only == "1"
    assert play(fa.LocalHead(head="0"), {0: 1.0, 1: 0.5})[1][0].only == "0"
    refine = play(fa.Refine(), {0: 1.0, 1: 0.5})[1][0]
    assert (refine.model, refine.mu, refine.lr) == (0, 0.0, None)
    assert play(fa.FromScratch(epochs=1), {-100: 1.0, 1: 0.5})[1][0].model == -100


def fomo(losses_of, sent, **options):
    """Run one pass of FedFomo for a client whose training adds 1 to a model of one number."""
    run = fa.PersonalFedFomo(epochs=1, **options).personalise(Start(torch.tensor([0.0]), None, client=3, seed=7))
    reply, asked = None, []
    while True:
        try:
            request = run.send(reply)
        except StopIteration as stop:
            return stop.value, asked
        if isinstance(request, Train):
            reply = request.model + 1
        elif isinstance(request, Exchange):
            reply = sent
        else:
            asked.append([float(model) for model in request.models])
            reply = [fa.Measure(losses_of(float(model)), None, 10) for model in request.models]


def test_fedfomo_moves_towards_candidates_that_lower_the_own_loss():
    candidates = {0: torch.tensor([4.0]), 1: torch.tensor([-3.0])}
    found, _ = fomo(lambda x: (x - 4) ** 2, candidates, candidates=0)
    # (16 − 9)/1 for its own training, (16 − 0)/4 for client 0, nothing for client 1, which has a higher loss
    assert float(found.model) == pytest.approx((7 * 1 + 4 * 4) / 11)
    worse, _ = fomo(lambda x: abs(x), candidates, candidates=0)
    assert float(worse.model) == 0.0  # nobody helps, so the served model stays


def test_fedfomo_measures_no_more_candidates_than_allowed_and_draws_them_again_alike():
    candidates = {n: torch.tensor([float(n + 2)]) for n in range(20)}
    asked = [fomo(lambda x: 1.0, candidates, candidates=4)[1] for _ in range(2)]
    assert asked[0] == asked[1]
    assert len(asked[0][1]) == 2 + 4  # the model before, its own training, four others


@given(st.floats(0, 5), st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 5)), min_size=1, max_size=8))
def test_fedfomo_s_weights_are_shares_of_those_that_improve(before, others):
    losses, lengths = zip(*others, strict=True)
    found = weights(before, losses, lengths)
    assert all((share > 0) <= (loss < before) for share, loss in zip(found, losses, strict=True))
    assert sum(found) == pytest.approx(1.0) or not any(loss < before for loss in losses) or sum(found) == 0
    models = [torch.tensor([float(n)]) for n in range(len(others))]
    assert -1e-4 <= float(mixed(torch.tensor([0.0]), models, found)) <= len(others)


def test_heads():
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    assert head_of(net) == ""
    net.head = nn.Linear(2, 2)
    assert head_of(net) == "head"
    assert parts_of(("head.weight", "header.weight", "head.bias"), "head") == (0, 2)
    with pytest.raises(fa.FedalignError, match=r"no trainable part 'tail'; it has 0.weight"):
        fa.LocalHead(head="tail").check(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": ["refin"]}, r"personal.methods\[0\].* is 'refin'; did you mean 'refine'\?"),
        ({"methods": ["refine"], "epoch": 3}, r"unknown key personal.epoch; did you mean 'epochs'\?"),
        ({"methods": ["refine"], "mu": 0.5}, "unknown key personal.mu"),
        ({"methods": ["refine(epochs=0)"]}, "refine.epochs must be a whole number of at least 1, not 0"),
        ({"methods": ["refine(lr=-1.0)"]}, "refine.lr must be a positive number, not -1.0"),
        ({"methods": ["refine", "refine(epochs=3)"]}, "personal has 'refine' twice"),
        ({"methods": ["fedfomo(senders='some')"]}, "senders"),
        ({"methods": ["fedfomo(candidates=-1)"]}, "candidates must be a whole number of at least 0"),
        ({"methods": ["fedfomo(explore=2.0)"]}, "explore must be from 0 to 1"),
        ({"epochs": 3}, "personal.methods is missing"),
        ({"methods": 3}, "personal.methods must be a list, not 3"),
        ({"methods": [], "save": 1}, "personal.save"),
    ],
)
def test_bad_settings_have_one_clear_sentence(given, message):
    with pytest.raises(fa.FedalignError, match=message):
        resolve_personal(given)


def test_shared_options_go_to_the_methods_that_have_them():
    table = resolve_personal({"methods": ["refine(epochs=2)", {"kind": "ditto"}], "epochs": 7, "mu": 0.3})
    assert [one["epochs"] for one in table["methods"]] == [2, 7]
    assert "mu" not in table["methods"][0]
    assert table["methods"][1]["mu"] == 0.3
    assert as_methods([fa.Ditto(mu=2.0), "refine"])["ditto"] == fa.Ditto(mu=2.0)
    with pytest.raises(fa.FedalignError, match=r"must hold fedalign\.PersonalMethod objects"):
        as_methods([3])


@pytest.mark.parametrize("samples", [48, 90])
def test_passes_have_the_rates_of_the_runs_last_and_first_step(samples):
    """A schedule may count a client's local steps; one that counts rounds gives all clients the same rate."""
    for schedule in (fa.InverseTime(mu=0.05, gamma=8), fa.Linear(0.3, 0.003), 0.1):
        local = fa.LocalSGD(lr=schedule, epochs=5, batch_size=10)
        steps, work = local.steps_for(samples), PersonalLocal(local, rounds=50)
        requests = {}
        for kind in (fa.Refine, fa.Ditto, fa.FromScratch):
            _, (requests[kind.name],) = play(kind(epochs=1), {0: 2.0, -100: 2.0, 1: 1.0})
        rates = {name: work(request, samples).lr for name, request in requests.items()}
        assert rates["refine"] == rates["ditto"] == local.rate(49, 50, steps - 1, steps)
        assert rates["scratch"] == local.rate(0, 50, 0, steps)
        assert work(Train(0, 0, lr=0.7), samples).lr == 0.7
