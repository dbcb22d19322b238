"""Hostile clients in simulations: who they are, when they strike, what they report, and what comes of it."""

import itertools

import numpy as np
import pytest
import torch
from conftest import assert_resumes_alike, blobs, federation, flat, linear

import fedalign as fa
from fedalign.attacks.catalogue import CATALOGUE
from fedalign.attacks.hostile import HostileClients, hostile_clients
from fedalign.attacks.settings import as_adversary, resolve_adversary
from fedalign.registry import ATTACKS

pytestmark = pytest.mark.slow

LOCAL = fa.LocalSGD(lr=0.3, epochs=3, batch_size=20)
FREE = 8


def honest_federation():
    """Two priority and eight free clients with the same task and no noise."""
    clients = [blobs(60, 10 + k) for k in range(2 + FREE)]
    test = [blobs(200, 90 + k) for k in range(2 + FREE)]
    return fa.Federation.from_arrays(clients, test=test, priority=[k < 2 for k in range(2 + FREE)])


def simulate(adversary, rule="all", rounds=8, make=linear, fed=None, **options):
    options = {"warmup": 0, "local": LOCAL, "device": "cpu", **options}
    return fa.simulate(fed or honest_federation(), make, rule, rounds, adversary=adversary, **options)


def accuracy(run):
    return run.history[-1].test_accuracy


@pytest.fixture(scope="module")
def clean():
    return accuracy(simulate(None))


@pytest.mark.parametrize("name", sorted(set(CATALOGUE) - {"buffers"}))  # the model has none; another test has
def test_each_attack_harms_plain_averaging_or_is_a_free_rider(name, clean):
    adversary = as_adversary({**CATALOGUE[name], "fraction": 0.75})
    if name in ("label-flip-truthful", "label-flip-blend"):
        adversary = as_adversary({**CATALOGUE[name], "fraction": 1.0})
    run = simulate(adversary)
    if name == "not-finite":
        refused = [c for c in run.history[-1].clients if c.decision == "refused"]
        assert len(refused) == 6
        assert "finite" in refused[0].reason
    elif any(attack.has_trigger for attack in adversary.attacks):
        # A plain model takes few samples with this trigger for class 2.
        table = resolve_adversary({**CATALOGUE[name], "fraction": 0.75})
        table["kind"][0]["target"] = 2
        success = {rule: simulate(table, rule).history[-1].attack_success for rule in ("all", "priority")}
        assert success["all"] > success["priority"] + 0.4
    elif adversary.free_rider:
        assert accuracy(run) > clean - 0.1
    else:
        worst = min(record.test_accuracy for record in run.history.rounds[-4:])
        assert worst < clean - 0.02


def test_the_built_in_attacks_are_all_in_the_catalogue():
    named = {attack["kind"] for table in CATALOGUE.values() for attack in resolve_adversary(table)["kind"]}
    assert named == set(ATTACKS.entries)


def test_larger_fractions_contain_smaller_ones():
    roster = honest_federation().roster
    found = [hostile_clients(fa.Adversary("zero", fraction=part), roster, 3) for part in (0, 0.25, 0.5, 0.75, 1)]
    assert [len(clients) for clients in found] == [0, 2, 4, 6, 8]
    assert all(small < large for small, large in itertools.pairwise(found))
    assert not any(roster.priority[k] for k in found[-1])
    assert hostile_clients(fa.Adversary("zero"), roster, 4) != found[1]
    names = [roster.names[5], roster.names[2]]
    assert hostile_clients(fa.Adversary("zero", clients=names), roster, 3) == {2, 5}
    for name in (roster.names[0], "nobody"):
        with pytest.raises(fa.FedalignError, match=f"{name!r}, which is no free client"):
            hostile_clients(fa.Adversary("zero", clients=[name]), roster, 0)


@pytest.mark.parametrize(
    ("settings", "active"),
    [
        ({}, range(10)),
        ({"start": 4}, range(4, 10)),
        ({"start": 0.5}, range(5, 10)),
        ({"last": 3}, (7, 8, 9)),
        ({"last": 30}, range(10)),
        ({"period": 2}, (0, 1, 4, 5, 8, 9)),
        ({"start": 3, "period": 3}, (3, 4, 5, 9)),
        ({"start": 8, "last": 5}, (8, 9)),
    ],
)
def test_when_they_are_hostile(settings, active):
    adversary = fa.Adversary("sign-flip(scale=5)", fraction=0.5, **settings)
    assert [t for t in range(10) if adversary.active(t, 10)] == list(active)
    hostile, honest = simulate(adversary, rounds=10), simulate(None, rounds=10)
    first = next(iter(active))
    for t in range(first):
        assert hostile.history[t].test_loss == honest.history[t].test_loss
    assert hostile.history[first].test_loss != honest.history[first].test_loss


def test_truthful_and_lied_reports():
    fed = honest_federation()
    rounds = {}
    for report in ("truthful", "aligned", "high", "low"):
        adversary = fa.Adversary("label-flip", fraction=0.5, report=report)
        run = simulate(adversary, fa.Align(epsilon=0.05), fed=fed, rounds=6)
        hostile = hostile_clients(adversary, fed.roster, 0)
        last = run.history[-1]
        rounds[report] = [(c, last) for c in last.clients if c.id in hostile]
    assert all(c.decision == "declined" and c.loss > last.global_loss + 0.05 for c, last in rounds["truthful"])
    assert all(c.decision == "admitted" and c.loss == last.global_loss for c, last in rounds["aligned"])
    assert all(c.decision == "refused" and c.loss > 50 * last.global_loss for c, last in rounds["high"])
    assert all(c.decision == "refused" and c.loss < 0.1 * last.global_loss for c, last in rounds["low"])


def test_claimed_samples_give_weight():
    fed, weights = honest_federation(), {}
    for samples in (1.0, 10.0):
        adversary = fa.Adversary("zero", fraction=0.25, samples=samples)
        record = simulate(adversary, fed=fed, rounds=1).history[0]
        weights[samples] = sum(c.weight for c in record.clients if c.id in hostile_clients(adversary, fed.roster, 0))
    assert weights[1.0] == pytest.approx(2 / 10)
    assert weights[10.0] == pytest.approx(20 / 28)
    capped = simulate(fa.Adversary("zero", fraction=0.25, samples=1e6), fed=fed, rounds=1, free_total=1.0).history[0]
    assert sum(c.weight for c in capped.clients if not c.priority) == pytest.approx(0.5)


def normalised():
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU(), torch.nn.Linear(5, 4))


@pytest.mark.parametrize("rule", ["all", "gradient", "auto"])
@pytest.mark.parametrize("kind", ["buffers", "not-finite", "not-finite(value='inf')"])
def test_impossible_updates_are_refused_and_the_run_goes_on(rule, kind):
    run = simulate(kind, rule, rounds=4, make=normalised)
    for record in run.history.rounds:
        refused = [c for c in record.clients if c.decision == "refused"]
        assert len(refused) == 2, [c.reason for c in record.clients]
        assert np.isfinite(record.test_loss)


KINDS = ("label-flip", "sign-flip(scale=3)", "gaussian", "alie(against='median')", "min-max", "backdoor; at-cosine")


@pytest.mark.parametrize("rule", ["all", "auto", "gradient"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_engines_agree_under_attack(rule, kind):
    runs = [
        simulate({"kind": kind, "fraction": 0.5, "period": 2}, rule, rounds=5, fed=federation(), engine=engine)
        for engine in ("batched", "reference")
    ]
    assert torch.allclose(flat(runs[0].model), flat(runs[1].model), atol=1e-4)
    for batched, reference in zip(*(run.history.rounds for run in runs), strict=True):
        assert [c.decision for c in batched.clients] == [c.decision for c in reference.clients]
        assert batched.attack_success == reference.attack_success


def test_a_fraction_is_at_least_one_client_and_an_adversary_that_never_attacks_is_refused():
    roster = federation().roster
    assert len(hostile_clients(fa.Adversary("zero", fraction=0.01), roster, 0)) == 1
    assert hostile_clients(fa.Adversary("zero", fraction=0.0), roster, 0) == frozenset()
    with pytest.raises(fa.FedalignError, match=r"adversary.start is 500, but the run has 4 rounds: nobody attacks"):
        simulate(fa.Adversary("zero", start=500), rounds=4)


def test_without_hostile_clients_nothing_changes():
    for rule in ("all", "auto", "gradient"):
        runs = [simulate(None, rule)]
        runs += [simulate(fa.Adversary("sign-flip", fraction=0.0), rule)]
        assert runs[0].history == runs[1].history
        assert torch.equal(flat(runs[0].model), flat(runs[1].model))


def test_what_attackers_know():
    seen = {}

    class Spy(fa.Attack):
        changes_updates = True

        def send(self, updates, scene):
            seen.setdefault(len(updates.own), []).append(len(updates.known))
            return updates.own

    fed = honest_federation()
    simulate(fa.Adversary(Spy(), fraction=0.5), rounds=1, fed=fed)
    simulate(fa.Adversary(Spy(), fraction=0.25, knows="own"), rounds=1, fed=fed)
    assert seen == {4: [6], 2: [2]}


def test_an_attack_of_the_wrong_shape_is_refused():
    class Short(fa.Attack):
        changes_updates = True

        def send(self, updates, scene):
            return {k: update[:3] for k, update in updates.own.items()}

    with pytest.raises(fa.FedalignError, match=r"an update of shape \(3,\), not \(28,\)"):
        simulate(fa.Adversary(Short()), rounds=1)


def test_a_backdoor_needs_a_class_that_exists():
    with pytest.raises(fa.FedalignError, match="target is 9, but there are 4 classes"):
        simulate("backdoor(target=9)", rounds=1)


def test_hostile_clients_leave_their_test_data_as_it_is():
    fed = honest_federation()
    hostile = HostileClients(fa.Adversary("label-flip", fraction=1.0), fed, 0, 5)
    k = min(hostile.clients)
    pool, rows = hostile.data(k, "test", 0)
    assert pool is fed.pool
    assert np.array_equal(rows, fed.clients[k].test)
    pool, rows = hostile.data(k, "train", 0)
    assert torch.equal(pool.y[rows], 3 - fed.pool.y[fed.clients[k].train])


def test_a_resumed_run_equals_an_uninterrupted_one(monkeypatch, tmp_path):
    settings = ["run", "synth-low", "--arms", "all,auto,gradient", "--seeds", "2", "--rounds", "8", "--quiet"]
    settings += ["--set", "adversary.kind=backdoor(target=1); gaussian(scale=2.0)", "--set", "adversary.period=2"]
    assert_resumes_alike(monkeypatch, tmp_path, settings, 5)
