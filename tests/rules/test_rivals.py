"""The nearest rivals: facts that their papers state, by hand and on federations, in both engines and under attack."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import assert_resumes_alike, blobs, linear
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedalign as fa
from fedalign.cli import main
from fedalign.protocol.fedalign import noise_of
from fedalign.protocol.roster import Roster
from fedalign.rules.fedgreed import falling
from fedalign.rules.maxfl import appeal
from fedalign.rules.meritfed import mirror_step, slopes
from fedalign.rules.rule import Broadcast, Measure, Offer, Similarity
from fedalign.simulation.engine.jobs import Data, TrainJob
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.engine.reference import ReferenceEngine
from fedalign.simulation.spec import initial_module
from fedalign.testing import MadeUpClients, play

LOCAL = fa.LocalSGD(lr=0.1, epochs=2, batch_size=10)
WEIGHING = [fa.MeritFed(), fa.FedFomo(), fa.FedGreed(), fa.MaxFL()]
RIVALS = [*WEIGHING, fa.FedGP(), fa.FedDA(), fa.FineTuned()]
NAMES = "meritfed,fedfomo,fedgreed,maxfl,fedgp,fedda,finetune"
FRIENDS, OTHERS = (2, 3, 4), (5, 6, 7)
named = pytest.mark.parametrize("rule", RIVALS, ids=NAMES.split(","))


def federation():
    """Two priority clients with little data, three free clients of the same kind, three whose labels are shifted."""
    train = [blobs(30, 10), blobs(30, 11), *(blobs(60, 20 + k) for k in FRIENDS)]
    train += [blobs(60, 20 + k, shift=1.0) for k in OTHERS]
    test = [blobs(200, 50 + k, shift=float(k in OTHERS)) for k in range(8)]
    return fa.Federation.from_arrays(train, test=test, priority=[k < 2 for k in range(8)], heldout_fraction=0.4)


def simulate(rule, rounds=3, **options):
    return fa.simulate(federation(), linear, rule, rounds, 0, LOCAL, device="cpu", **options)


def flat(module):
    return Layout(module).flatten(module).double()


def share(record, clients):
    return sum(record.clients[k].weight for k in clients)


# What the papers show: clients of the target's distribution gain weight, those of others lose it.


@pytest.mark.parametrize("engine", ["batched", "reference"])
def test_meritfed_finds_the_friends(engine):
    history = simulate(fa.MeritFed(), 25, engine=engine).history
    first, last = history[0], history[-1]
    equal = 1 / 8
    assert share(last, FRIENDS) > 3 * equal
    assert share(last, FRIENDS) + share(last, (0, 1)) > 0.999 > share(first, FRIENDS) + share(first, (0, 1))
    weights = [share(record, OTHERS) for record in history]
    assert all(after < before for before, after in itertools.pairwise(weights[:8]))
    assert weights[-1] < 1e-3
    assert history.final("test_accuracy") > simulate(fa.PriorityOnly(), 25).history.final("test_accuracy") + 0.02


def test_fedgp_and_fedda_weigh_friends_and_leave_others():
    alone = simulate(fa.PriorityOnly(), 25).history.final("test_accuracy")
    projected = simulate(fa.FedGP(), 25).history
    assert all(share(record, FRIENDS) > 0.4 for record in projected)
    assert all(share(record, OTHERS) == 0 for record in projected)
    assert projected.final("test_accuracy") > alone + 0.02
    plain = simulate(fa.FedDA(), 25).history
    assert all(share(record, FRIENDS) > 2.5 * share(record, OTHERS) for record in plain)
    assert share(plain[-1], OTHERS) < share(plain[0], OTHERS) / 5
    assert plain.final("test_accuracy") > alone
    # With the same weight for all sources, FedDA takes the others too: the closed form is what keeps them out.
    assert share(simulate(fa.FedDA(beta=0.5), 25).history[-1], OTHERS) == pytest.approx(0.25)


@pytest.mark.parametrize("rule", [fa.FedFomo(), fa.FedGreed()])
def test_rules_by_measured_losses_leave_the_others_out(rule):
    history = simulate(rule, 15).history
    assert share(history[-1], FRIENDS) > 0.2
    assert share(history[-1], OTHERS) < 0.02


# By hand, with models that are numbers: the priority clients' loss is (model − 1)².


class Square(MadeUpClients):
    """Clients send the given numbers; every loss is a squared distance, that of client k from goals[k]."""

    def __init__(self, trained, priority=1, goals=None, **options):
        flags = tuple(k < priority for k in range(len(trained)))
        super().__init__(Roster(tuple("abcdefg"[: len(trained)]), flags, (10,) * len(trained)), **options)
        self._sent, self._goals = trained, goals or {}

    def train(self, model, client):
        return self._sent[client]

    def measure(self, model, client, split):
        return Measure((model - self._goals.get(client, 1.0)) ** 2, None, 5)

    def similarity(self, client):
        length = abs(self._sent[0] - self.received)
        return Similarity(1.0, abs(self._sent[client] - self.received) / length) if length else Similarity(0.0, 0.0)


def test_fedfomo_by_hand():
    played = play(fa.FedFomo(), Square({0: 0.5, 1: 0.8, 2: -1.0}))
    weights = {0: (1 - 0.25) / 0.5, 1: (1 - 0.04) / 0.8, 2: 0.0}
    total = sum(weights.values())
    assert played.model == pytest.approx((weights[0] * 0.5 + weights[1] * 0.8) / total)
    clients = played.history[0].clients
    assert [c.weight for c in clients] == pytest.approx([weights[k] / total for k in range(3)])
    assert [c.decision for c in clients] == ["trained", "admitted", "refused"]
    assert clients[2].reason == "its model changes the priority clients' loss by +3"
    # No model is better than the one before: FedAvg on the priority clients.
    assert play(fa.FedFomo(), Square({0: 4.0, 1: -3.0}), model=1.0).model == 4.0


def test_fedgreed_by_hand():
    # Losses 0.04 (b), 0.09 (c), 1 (a): b and c are on either side of 1, and a only does harm.
    played = play(fa.FedGreed(), Square({0: 0.0, 1: 0.8, 2: 1.3}), model=-1.0)
    assert played.model == pytest.approx(1.05)
    assert [c.decision for c in played.history[0].clients] == ["trained", "admitted", "admitted"]
    # The second best does not help: the first alone, though all three together would be better still.
    assert play(fa.FedGreed(), Square({0: 0.9, 1: 0.8, 2: 1.3})).model == 0.9
    assert falling([]) == 0


def test_meritfed_reaches_the_minimum_over_the_simplex():
    clients = Square({0: 0.0, 1: 4.0, 2: -3.0})
    played = play(fa.MeritFed(steps=300, rate=0.05), clients, model=-1.0)
    assert played.model == pytest.approx(1.0, abs=0.1)
    outside = play(fa.MeritFed(steps=100), Square({0: 0.0, 1: -4.0, 2: -3.0}), model=-1.0)  # the best corner
    assert outside.model == pytest.approx(0.0, abs=1e-3)
    # The next round starts where this one ended.
    memory = played.rounds[-1].snapshot.values["memory"]["weights"]
    assert math.fsum(memory.values()) == pytest.approx(1)
    assert memory["2"] < memory["0"]


def test_maxfl_by_hand():
    # Alone, both reach a loss of 0 (their goals are what they send). At 0, a's loss is 1 and b's 9.
    goals = {0: 1.0, 1: 3.0}
    played = play(fa.MaxFL(), Square({0: 1.0, 1: 3.0}, goals=goals), rounds=2)
    q = [appeal(1.0, 0.0), appeal(9.0, 0.0)]
    slope = math.exp(-1) / (1 + math.exp(-1)) ** 2
    assert q[0] == pytest.approx(slope)
    assert [c.weight for c in played.history[0].clients] == pytest.approx([q[0] / sum(q), q[1] / sum(q)])
    # Thresholds are measured once.
    own = [r for r in played.requests if type(r).__name__ == "Evaluate" and len(r.asked) == 2 and not r.for_record]
    assert len(own) == 1
    assert played.rounds[-1].snapshot.values["memory"] == {"alone": {"0": 0.0, "1": 0.0}}


def test_fine_tuning_is_fedavg_and_then_fedavg_on_the_priority_clients():
    assert torch.equal(flat(simulate(fa.FineTuned(last=0)).model), flat(simulate(fa.Everyone()).model))
    assert torch.equal(flat(simulate(fa.FineTuned(last=1)).model), flat(simulate(fa.PriorityOnly()).model))
    history = simulate(fa.FineTuned(last=0.5), 4).history
    assert [record.admitted for record in history] == [6, 6, 0, 0]
    assert history[3].clients[2].reason == "fine-tuning on the priority clients"


def updates_by_hand(fed, start):
    engine = ReferenceEngine(start, fa.cross_entropy, Data([fed.pool], torch.device("cpu"), torch.float32))
    vector = engine.layout.flatten(start)
    jobs = [TrainJob(vector, fed.pool, fed.clients[k].train, LOCAL, 0, 0, 1, k) for k in range(len(fed))]
    return [(next(engine.train([job])).model - vector).double() for job in jobs]


@pytest.mark.parametrize("engine", ["batched", "reference"])
@pytest.mark.parametrize("projected", [True, False])
def test_fedgp_and_fedda_by_their_formulas(engine, projected):
    fed, start = federation(), initial_module(linear, 0)
    updates = updates_by_hand(fed, start)
    target = (updates[0] + updates[1]) / 2
    variance = float((updates[0] - target) @ (updates[0] - target))  # two clients: s² / 2
    parts = []
    for update in updates[2:]:
        used = update
        if projected:
            inner = float(update @ target)
            if inner <= 0:
                continue
            used = inner * update / (update @ update)
        error = float((used - target) @ (used - target))
        beta = variance / (variance + max(0.0, error - variance))
        parts.append((1 - beta) * target + beta * used)
    expected = flat(start) + torch.stack(parts).mean(0)
    rule = fa.FedGP() if projected else fa.FedDA()
    assert torch.allclose(flat(simulate(rule, 1, engine=engine).model), expected, atol=1e-5)


def test_the_noise_is_the_variance_of_the_mean_update():
    draw = np.random.default_rng(0)
    shares = np.array([0.5, 0.3, 0.2])
    estimates, means = [], []
    for _ in range(4000):
        updates = 3.0 + draw.normal(size=(3, 20))
        mean = shares @ updates
        length = np.linalg.norm(mean)
        alike = {
            k: Similarity(u @ mean / np.linalg.norm(u) / length, np.linalg.norm(u) / length)
            for k, u in enumerate(updates)
        }
        estimates.append(noise_of(dict(enumerate(shares)), alike) * length**2)
        means.append(mean)
    assert np.mean(estimates) == pytest.approx(np.var(means, axis=0).sum(), rel=0.03)
    assert noise_of({0: 1.0}, {0: Similarity(1.0, 1.0)}) is None


def test_one_priority_client_has_the_papers_fixed_weight():
    offers = {1: Offer(Measure(1.0, None, 1), Similarity(0.5, 1.0))}
    assert fa.FedGP().select(offers, Broadcast(0, 1.0)).weight == {1: 1.0}  # as much as the target: 0.5
    with pytest.raises(fa.FedalignError, match="FedGP's beta must be 'auto' or from 0 to 1, not 2"):
        fa.FedGP(beta=2)


# What must hold whatever free clients do.


@given(
    losses=st.lists(st.one_of(st.floats(0, 1e300), st.just(math.inf)), min_size=1, max_size=8),
    rate=st.floats(1e-3, 1e3),
    rounds=st.integers(1, 5),
)
def test_mirror_descent_stays_on_the_simplex(losses, rate, rounds):
    weights = {k: 1 / len(losses) for k in range(len(losses))}
    for _ in range(rounds):
        weights = mirror_step(weights, dict(enumerate(slopes(losses, 0.05))), rate)
        assert all(0 <= weight <= 1 for weight in weights.values())
        assert math.fsum(weights.values()) == pytest.approx(1)
    finite = [k for k, loss in enumerate(losses) if math.isfinite(loss)]
    if finite:
        best = min(finite, key=losses.__getitem__)
        assert weights[best] >= max(weights.values()) * (1 - 1e-9)


@given(
    offers=st.lists(st.tuples(st.floats(-1, 1), st.one_of(st.just(0.0), st.floats(1e-30, 1e30))), max_size=6),
    noise=st.one_of(st.none(), st.floats(0, 1e20)),
)
@pytest.mark.parametrize("rule", [fa.FedGP(), fa.FedDA(), fa.FedDA(beta=1.0)])
def test_closed_form_weights_are_weights(rule, offers, noise):
    given_offers = {k: Offer(Measure(1.0, None, 1), Similarity(*one), noise) for k, one in enumerate(offers)}
    found = rule.select(given_offers, Broadcast(0, 1.0))
    total = sum(found.weight.values())
    assert all(0 < weight < math.inf for weight in found.weight.values())
    assert total <= 1000 * (1 + 1e-9)  # beside 1 for the target
    assert set(found.clients) == set(found.weight) == set(found.step) <= {k for k in given_offers if offers[k][1] > 0}


@given(
    losses=st.dictionaries(st.integers(1, 5), st.floats(), min_size=1),
    sent=st.dictionaries(st.integers(0, 5), st.floats(-1e6, 1e6)),
)
@pytest.mark.parametrize("rule", WEIGHING, ids=NAMES.split(",")[:4])
def test_weights_stay_on_the_simplex_whatever_clients_report_and_send(rule, losses, sent):
    class Liars(Square):
        def reply(self, request, client):
            found = super().reply(request, client)
            if client not in losses:
                return found
            return type(found)(Measure(losses[client], None, 5))

    models = {k: sent.get(k, 0.5 * k + 0.5) for k in range(6)}
    models[0] = 0.5  # a priority client's
    weights = [c.weight for c in play(rule, Liars(models), rounds=2).history[-1].clients]
    assert all(0 <= weight <= 1 + 1e-9 for weight in weights)
    assert math.fsum(weights) == pytest.approx(1)


@pytest.mark.parametrize("attack", ["not-finite", "zero", "scaling(factor=1e30)", "sign-flip(scale=1000)", "copied"])
@named
def test_no_attack_ends_a_run(rule, attack):
    if rule == fa.FineTuned() or (isinstance(rule, fa.FedDA | fa.MaxFL) and "factor" in attack):
        bound = ["length-bound(times=10)"]  # they average what they are sent, as FedAvg does
    else:
        bound = []
    history = simulate(rule, 4, adversary=fa.Adversary(attack, fraction=0.5), server_steps=bound).history
    assert len(history) == 4
    assert all(math.isfinite(record.test_loss) for record in history)


def test_an_aggregate_without_a_finite_loss_is_not_served():
    class Deaf(Square):
        """The priority client measures the models that it received or that are served, and no candidates."""

        def answer(self, request):
            if type(request).__name__ == "Evaluate" and not request.for_record and request.asked[0][0] != self.start:
                return [{} for _ in request.asked]
            return super().answer(request)

    for rule in WEIGHING:
        clients = Deaf({0: 0.5, 1: 0.8})
        clients.start = 0.0
        record = play(rule, clients).history[0]
        assert [c.weight for c in record.clients] == [1.0, 0.0]
        assert "the priority clients' own" in record.clients[1].reason


def test_caps_hold_and_zero_updates_have_no_weight():
    history = simulate(fa.MeritFed(), 5, free_total=0.1).history
    assert all(share(record, range(2, 8)) <= 0.1 / 1.1 + 1e-9 for record in history)
    idle = simulate(fa.MaxFL(), 2, adversary=fa.Adversary("zero", fraction=1.0)).history
    assert all(share(record, range(2, 8)) == 0 for record in idle)
    assert idle[1].clients[3].reason == "its update is zero"


# In both engines, after an interruption, in settings files.


@named
def test_both_engines_agree(rule):
    def normalised():
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))

    for make in (linear, normalised):
        found = [
            fa.simulate(federation(), make, rule, 4, 1, LOCAL, device="cpu", engine=engine)
            for engine in ("batched", "reference")
        ]
        for one, other in zip(*(result.history.rounds for result in found), strict=True):
            assert [c.decision for c in one.clients] == [c.decision for c in other.clients]
            assert [c.weight for c in one.clients] == pytest.approx([c.weight for c in other.clients], abs=1e-3)
            assert one.test_loss == pytest.approx(other.test_loss, rel=1e-3)


@named
def test_a_result_does_not_depend_on_what_else_is_simulated(rule):
    fed = federation()
    spec = fa.RunSpec(fed, rule, 3, 0, LOCAL)
    alone = fa.simulate_many([spec], linear, device="cpu")[0]
    among = fa.simulate_many([fa.RunSpec(fed, fa.Everyone(), 3, 0, LOCAL), spec], linear, device="cpu")[1]
    assert among.history == alone.history


def test_rivals_survive_an_interruption(tmp_path, monkeypatch):
    settings = ["run", "synth-low", "--arms", NAMES, "--seeds", "1", "--rounds", "6", "--quiet"]
    settings += ["--set", "data.samples=40", "--set", "server.kind=fedavgm"]
    assert_resumes_alike(monkeypatch, tmp_path, settings, round=4)


def test_rivals_work_with_few_clients_in_a_round():
    for rule in RIVALS:
        history = simulate(rule, 4, participation=fa.Uniform(0.5)).history
        assert all(
            record.skipped or math.fsum(c.weight for c in record.clients) == pytest.approx(1) for record in history
        )


def test_rivals_in_settings_and_in_the_list(tmp_path, capsys):
    settings = ["run", "synth-low", "--seeds", "1", "--rounds", "2", "--quiet", "--set", "data.samples=40"]
    own = ["--set", "arm.meritfed.steps=2", "--set", "arm.fedgp.beta=0.5", "--set", "arm.finetune.last=0.5"]
    assert main([*settings, "--arms", NAMES, *own, "--out", str(tmp_path / "a")]) == 0
    assert main([*settings, "--arms", "meritfed", "--set", "arm.meritfed.rate=0", "--out", str(tmp_path / "b")]) == 2
    assert "MeritFed's rate must be a number above 0, not 0" in capsys.readouterr().err
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*NAMES.split(","), "rotated-fmnist", "alike-fmnist"))
    with pytest.raises(fa.FedalignError, match="SCAFFOLD cannot be combined with MeritFed"):
        fa.simulate(federation(), linear, "meritfed", 1, local=fa.LocalSGD(lr=0.1, epochs=1, scaffold=True))
    with pytest.raises(fa.FedalignError, match="runs the algorithm 'weighing', which cannot be verified"):
        simulate(fa.FedFomo(), trust="verify")


def test_a_rule_that_weighs_wrongly_is_refused():
    class Wrong(fa.WeighingRule):
        def __init__(self, weights):
            self.weights = weights

        def weigh(self, trial):
            yield from trial.losses([trial.received])
            return fa.Weighed(self.weights)

    for weights, message in (({9: 1.0}, "client 9, whose update is not there"), ({0: -1.0}, "the weight -1.0")):
        with pytest.raises(fa.FedalignError, match=message):
            play(Wrong(weights), Square({0: 0.5, 1: 0.8}))
