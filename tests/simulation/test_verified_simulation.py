"""Verified rounds in a simulation: hostile free clients, even a majority, do not harm the priority clients."""

import json
import warnings

import numpy as np
import pytest
import torch
from conftest import assert_resumes_alike, blobs, linear

import fedalign as fa
from fedalign.attacks.adversary import Adversary
from fedalign.attacks.attack import Attack
from fedalign.protocol.resemblance import COPY
from fedalign.simulation.api import simulate_many
from fedalign.simulation.spec import RunSpec

pytestmark = pytest.mark.slow

PRIORITY, FREE, ROUNDS = 3, 8, 10
RULES = {"all": fa.Everyone, "verified": fa.Verified}
LOCAL = fa.LocalSGD(lr=0.2, epochs=2, batch_size=20)
ATTACKS = {
    "label-flip": {"kind": "label-flip"},
    "label-flip, inflated counts": {"kind": "label-flip", "samples": 50.0},
    "sign-flip": {"kind": "sign-flip(scale=9.9)"},
    "ipm": {"kind": "ipm(factor=8.0)"},
    "gaussian": {"kind": "gaussian(scale=9.0)"},
    "not finite": {"kind": "not-finite"},
    "strike": {"kind": "sign-flip(scale=99.0)", "last": 1},
    "on and off": {"kind": "harmful-direction(length=9.0)", "period": 2},
}


def hostile_federation():
    """Free clients have clean data of the task; they bring a gain of several points where they are honest."""
    clients = PRIORITY + FREE
    train = [blobs(60, 10 + k, shift=0.1 if k < PRIORITY else 0.0) for k in range(clients)]
    test = [blobs(200, 500 + k) for k in range(clients)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fa.FederationWarning)
        return fa.Federation.from_arrays(
            train, test=test, priority=[k < PRIORITY for k in range(clients)], heldout_fraction=0.4
        )


@pytest.fixture(scope="module")
def fed():
    return hostile_federation()


def accuracy(result):
    if result.error is not None:
        return 0.0
    return result.history[-1].test_accuracy


def run(fed, rule, adversary=None, seed=0, rounds=ROUNDS, **options):
    return RunSpec(fed, rule, rounds, warmup=0, local=LOCAL, seed=seed, adversary=adversary, **options)


@pytest.fixture(scope="module")
def outcomes(fed):
    """Run everything in one stacked simulation."""
    specs = {("priority", "none", 0.0): run(fed, fa.PriorityOnly())}
    specs |= {(name, "none", 0.0): run(fed, rule()) for name, rule in RULES.items()}
    for attack, options in ATTACKS.items():
        for fraction in (0.25, 0.75):
            for name, rule in RULES.items():
                specs[name, attack, fraction] = run(fed, rule(), Adversary(fraction=fraction, **options))
    return dict(zip(specs, simulate_many(list(specs.values()), linear, device="cpu"), strict=True))


def test_without_attack_honest_clients_help(outcomes):
    assert accuracy(outcomes["verified", "none", 0.0]) > accuracy(outcomes["priority", "none", 0.0]) + 0.005


@pytest.mark.parametrize("fraction", [0.25, 0.75])
@pytest.mark.parametrize("attack", ATTACKS)
def test_the_priority_clients_are_not_worse_off(outcomes, attack, fraction):
    alone = accuracy(outcomes["priority", "none", 0.0])
    assert accuracy(outcomes["verified", attack, fraction]) >= alone - 0.01
    if fraction == 0.75 and attack != "not finite":  # which no rule aggregates
        assert accuracy(outcomes["all", attack, fraction]) < alone - 0.05


def test_a_strike_in_the_last_round_is_not_served(outcomes):
    history = outcomes["verified", "strike", 0.75].history
    before, last = history.rounds[-2:]
    assert before.admitted > 0
    assert last.test_accuracy >= before.test_accuracy - 0.01


@pytest.mark.parametrize("attack", ["label-flip", "strike", "not finite"])
def test_records_agree_with_themselves(outcomes, attack):
    for record in outcomes["verified", attack, 0.75].history.rounds:
        weights = [client.weight for client in record.clients]
        assert sum(weights) == pytest.approx(1.0)
        assert 0 < record.inclusion <= 1
        for client in record.clients:
            assert (client.weight > 0) == (client.decision in ("trained", "admitted"))
            assert client.reason
        in_training = any(client.decision == "base" for client in record.clients)
        assert not in_training or record.inclusion < 1
        if record.tried:
            assert sum(tried.chosen for tried in record.tried) == 1
        assert json.loads(record.to_json())["round"] == record.round


@pytest.mark.parametrize("attack", ["ipm(factor=8.0)", "mimic(client=4)"])
def test_a_majority_that_sends_one_update_is_left_out_as_copies(fed, attack):
    """Three quarters of the free clients are what is usual among them: nobody would be an outlier."""
    majority = Adversary(attack, fraction=0.75)
    found = simulate_many([run(fed, fa.Verified(), majority), run(fed, fa.Verified())], linear, device="cpu")
    hostile = {client.name for record in found[0].history for client in record.clients if client.reason == COPY}
    by_chance = [client for record in found[1].history for client in record.clients if client.reason == COPY]
    assert len(hostile) >= 6
    assert len(by_chance) <= 1  # 28 parameters: honest updates are seldom close by chance
    for record in found[0].history:
        assert not any(c.decision == "admitted" for c in record.clients if c.reason == COPY)


def test_the_promise_is_recorded(outcomes):
    rounds = outcomes["verified", "none", 0.0].history.rounds
    assert all(record.promise is not None for record in rounds)
    assert all(-1 <= record.promise.worse_by <= record.promise.strict <= 1 for record in rounds)
    admitted = [record for record in rounds if record.admitted]
    assert admitted
    assert all(record.promise.samples == PRIORITY * 24 for record in admitted)
    served_own = [record for record in rounds if record.fallback and record.fallback.behind]
    assert all(record.promise.worse_by == 0.0 for record in served_own)


@pytest.mark.parametrize("attack", [None, "sign-flip(scale=9.9)", "alie"])
def test_both_engines_agree(fed, attack):
    adversary = Adversary(attack, fraction=0.5) if attack else None
    found = [
        simulate_many([run(fed, fa.Verified(), adversary, rounds=4)], linear, device="cpu", engine=engine)[0]
        for engine in ("batched", "reference")
    ]
    for one, other in zip(*(result.history.rounds for result in found), strict=True):
        assert [c.decision for c in one.clients] == [c.decision for c in other.clients]
        assert one.test_loss == pytest.approx(other.test_loss, rel=1e-4)


def test_a_result_does_not_depend_on_what_else_is_simulated(fed):
    adversary = Adversary("alie", fraction=0.5)
    alone = simulate_many([run(fed, fa.Verified(), adversary)], linear, device="cpu")[0]
    specs = [run(fed, fa.Everyone()), run(fed, fa.Verified(), adversary), run(fed, fa.Verified())]
    assert simulate_many(specs, linear, device="cpu")[1].history == alone.history


class Once(Attack):
    """Counts how often updates are crafted in a round."""

    changes_updates = True

    def __init__(self):
        self.seen = []

    def send(self, updates, scene):
        self.seen.append((scene.round, len(updates.known)))
        return updates.own


def test_clients_train_and_send_once_for_the_probes_and_the_sets(fed):
    attack = Once()
    simulate_many([run(fed, fa.Verified(probes=2), Adversary(attack), rounds=3)], linear, device="cpu")
    assert attack.seen == [(t, PRIORITY + 6) for t in range(3)]


@pytest.mark.parametrize("fraction", [0.125, 1.0])
@pytest.mark.parametrize("kind", ["alie", "min-max", "min-sum", "mimic", "copied", "zero", "harmful-direction"])
@pytest.mark.parametrize("knows", ["all", "own"])
def test_single_attackers_and_nobody_but_attackers(fed, kind, fraction, knows):
    adversary = Adversary(kind, fraction=fraction, knows=knows)
    results = simulate_many(
        [run(fed, fa.PriorityOnly(), rounds=4), run(fed, fa.Verified(), adversary, rounds=4)], linear, device="cpu"
    )
    assert results[1].error is None
    assert accuracy(results[1]) >= accuracy(results[0]) - 0.03


@pytest.mark.parametrize(
    "options",
    [
        {"participation": fa.Uniform(0.5)},
        {"participation": fa.Replacement(2)},
        {"participation": fa.Bernoulli(0.7)},
        {"server": fa.FedAdam(lr=0.1)},
        {"server": fa.FedAvgM()},
    ],
)
def test_other_settings(fed, options):
    adversary = Adversary("sign-flip(scale=9.9)", fraction=0.75)
    results = simulate_many(
        [run(fed, rule, adversary, **options) for rule in (fa.PriorityOnly(), fa.Everyone(), fa.Verified())],
        linear, device="cpu",
    )  # fmt: skip
    alone, everyone, verified = map(accuracy, results)
    assert verified >= alone - 0.02
    assert everyone < alone


def test_regression_has_no_accuracy_and_no_promise():
    draw = np.random.default_rng(0)
    weights = draw.normal(size=(4, 1))

    def samples(n, wrong):
        x = draw.normal(size=(n, 4)).astype(np.float32)
        return x, ((-1 if wrong else 1) * x @ weights + 0.1 * draw.normal(size=(n, 1))).astype(np.float32)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fa.FederationWarning)
        made = fa.Federation.from_arrays(
            [samples(30, wrong=k > 2) for k in range(6)], test=[samples(30, wrong=False) for _ in range(6)],
            priority=[k < 2 for k in range(6)], heldout_fraction=0.3,
        )  # fmt: skip
    alone, everyone, verified = (
        fa.simulate(
            made,
            lambda: torch.nn.Linear(4, 1),
            rule,
            rounds=5,
            warmup=0,
            local=LOCAL,
            device="cpu",
            loss="squared-error",
        ).history[-1]
        for rule in (fa.PriorityOnly(), fa.Everyone(), fa.Verified())
    )
    assert verified.promise is None
    assert verified.test_loss <= 1.1 * alone.test_loss
    assert everyone.test_loss > 2 * alone.test_loss


def test_a_resume_equals_an_uninterrupted_run(monkeypatch, tmp_path):
    settings = ["run", "synth-low", "--arms", "fedalign-verified", "--seeds", "1", "--rounds", "6", "--quiet"]
    assert_resumes_alike(monkeypatch, tmp_path, settings, round=3)


class TestBackdoor:
    """On images, whose corner the honest clients never see bright."""

    @staticmethod
    def images(n, seed):
        draw = np.random.default_rng(seed)
        y = draw.integers(0, 4, n)
        patterns = np.random.default_rng(7).random((4, 8, 8)) > 0.5
        x = patterns[y] * 0.6 + 0.5 * draw.normal(size=(n, 8, 8))
        x[:, :2, :2] = 0.0
        return x.astype(np.float32), y

    def test_a_plain_backdoor_of_a_quarter_fails(self):
        clients = PRIORITY + FREE
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fa.FederationWarning)
            made = fa.Federation.from_arrays(
                [self.images(60, k) for k in range(clients)], test=[self.images(100, 100 + k) for k in range(clients)],
                priority=[k < PRIORITY for k in range(clients)], heldout_fraction=0.4,
            )  # fmt: skip
        adversary = Adversary("backdoor(size=2)", fraction=0.25)
        everyone, verified = (
            result.history.final("attack_success")
            for result in simulate_many(
                [run(made, rule(), adversary) for rule in RULES.values()],
                lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4)),
                device="cpu",
            )
        )
        assert everyone > 0.5
        assert verified < 0.15
