"""Rules from the literature, and server optimisers: facts that are known of them, not merely that they run."""

import math

import numpy as np
import pytest
import torch
from conftest import assert_resumes_alike, blobs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedalign as fa
from fedalign.cli import main
from fedalign.experiments.store import RunStore
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Broadcast, Measure, Offer, Selection, Similarity
from fedalign.simulation import driver
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.spec import initial_module
from fedalign.testing import MadeUpClients, play
from fedalign.training.server import Partial

LOCAL = fa.LocalSGD(lr=0.05, epochs=2, batch_size=10)


def model():
    return nn.Linear(6, 4)


def federation(free=3):
    x, y = blobs(60, 9)
    clients = [blobs(40, 0), blobs(20, 1), (x, y), (x, (y + 1) % 4), (x, np.zeros_like(y))][: 2 + free]
    return fa.Federation.from_arrays(clients, priority=[True, True, *[False] * free])


def run(rule, rounds=3, fed=None, **options):
    return fa.simulate(fed or federation(), model, rule, rounds, 0, LOCAL, device="cpu", **options)


def flat(module):
    return Layout(module).flatten(module).double()


def updates_by_hand(fed, start):
    """Train every client from one model with the plain engine."""
    found = []
    for k in range(len(fed)):
        from fedalign.simulation.engine.jobs import Data, TrainJob
        from fedalign.simulation.engine.reference import ReferenceEngine

        engine = ReferenceEngine(start, fa.cross_entropy, Data([fed.pool], torch.device("cpu"), torch.float32))
        vector = engine.layout.flatten(start)
        job = TrainJob(vector, fed.pool, fed.clients[k].train, LOCAL, 0, 0, 1, k)
        found.append((next(engine.train([job])).model - vector).double())
    return found


def start_of(seed=0):
    """Give the module that a run with this seed begins with."""
    return initial_module(model, seed)


@pytest.mark.parametrize("engine", ["batched", "reference"])
def test_cosines_are_those_of_the_updates(engine, monkeypatch):
    fed, seen, offered = federation(), {}, {}
    similarities_to = driver.similarities_to

    class Spy(fa.GradientAlign):
        def select(self, offers, broadcast):
            offered.update(offers)
            return super().select(offers, broadcast)

    def spy(update, reference, clients):
        seen.update(similarities_to(update, reference, clients))
        return dict(seen)

    monkeypatch.setattr(driver, "similarities_to", spy)
    run(Spy(), rounds=1, fed=fed, engine=engine)
    updates = updates_by_hand(fed, start_of())
    mean = fed.p[0] * updates[0] + fed.p[1] * updates[1]
    assert set(seen) == {0, 1, 2, 3, 4}
    assert {k: offer.similarity for k, offer in offered.items()} == {k: seen[k] for k in (2, 3, 4)}
    assert all((offer.cosine, offer.length) == (seen[k].cosine, seen[k].length) for k, offer in offered.items())
    for k, update in enumerate(updates):
        assert seen[k].cosine == pytest.approx(float(update @ mean / update.norm() / mean.norm()), abs=1e-4)
        assert seen[k].length == pytest.approx(float(update.norm() / mean.norm()), rel=1e-4)


def test_gradient_alignment_admits_by_its_threshold():
    fed = federation()
    everyone, nobody = run(fa.GradientAlign(-1), fed=fed), run(fa.GradientAlign(1), fed=fed)
    assert torch.allclose(flat(everyone.model), flat(run(fa.Everyone(), fed=fed).model), atol=1e-6)
    assert torch.allclose(flat(nobody.model), flat(run(fa.PriorityOnly(), fed=fed).model), atol=1e-6)
    record = run(fa.GradientAlign(0.2), fed=fed).history[0]
    assert [c.decision for c in record.clients[:3]] == ["trained", "trained", "admitted"]
    assert "cosine" in record.clients[3].reason
    with pytest.raises(fa.FedalignError, match="a cosine, from -1 to 1"):
        fa.GradientAlign(2)
    still = fa.GradientAlign(-1).select({2: Offer(Measure(1.0, None, 1), Similarity(0.0, 0.0))}, Broadcast(0, 1.0))
    assert still.clients == ()  # it would only hold the others back


def test_trust_weights_are_fltrusts():
    fed = federation()
    result = run(fa.TrustWeighted(), rounds=1, fed=fed)
    start = start_of()
    updates = updates_by_hand(fed, start)
    root = fed.p[0] * updates[0] + fed.p[1] * updates[1]
    total, weight = root.clone(), 1.0
    for update in updates[2:]:
        trust = max(0.0, float(update @ root / update.norm() / root.norm()))
        total += trust * update * root.norm() / update.norm()
        weight += trust
    expected = flat(start) + total / weight
    assert torch.allclose(flat(result.model), expected, atol=1e-5)
    # Nobody to trust: FedAvg on the priority clients.
    opposed = fa.TrustWeighted().select({1: Offer(Measure(1.0, None, 1), Similarity(-0.5, 2.0))}, Broadcast(0, 1.0))
    assert opposed.clients == ()


def test_trust_by_hand():
    class Longer(MadeUpClients):
        def similarity(self, client):
            return Similarity(0.5, 4.0)

    roster = Roster(("a", "b"), (True, False), (10, 10))
    played = play(fa.TrustWeighted(), Longer(roster, {0: 1.0, 1: 9.0}, {0: 3.0, 1: 9.0}), 1.0)
    # The root moves by 2. The other's 8 is four times as long, so it moves by 2 as well, with half the trust.
    assert played.model == pytest.approx(1 + (2 + 0.5 * 8 / 4) / 1.5)
    assert played.history[0].clients[1].reason == "cosine 0.5: trust 0.5"


@pytest.mark.parametrize("engine", ["batched", "reference"])
def test_trust_stretches_weights_and_averages_statistics(engine):
    x, y = blobs(8, 9)
    fed = fa.Federation.from_arrays([blobs(400, 0), blobs(400, 1), (x, y), (x, y)], priority=[True, True, False, False])

    def make():
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))

    result = fa.simulate(fed, make, fa.TrustWeighted(), 1, 0, LOCAL, device="cpu", engine=engine)
    weights = [c.weight for c in result.history[0].clients]
    assert weights[2] > 0.1
    alone = fa.simulate(fed, make, fa.PriorityOnly(), 1, 0, LOCAL, device="cpu", engine=engine)
    spoiled = [fa.simulate(fed, make, Only(k), 1, 0, LOCAL, device="cpu", engine=engine) for k in (2, 3)]
    # From models with one free client each, at half the weight: that client's own statistics, and so their mean.
    own = [2 * one.model[1].running_var - alone.model[1].running_var for one in spoiled]
    expected = (1 - weights[2] - weights[3]) * alone.model[1].running_var + weights[2] * own[0] + weights[3] * own[1]
    assert torch.allclose(result.model[1].running_var, expected, atol=1e-5)
    assert (result.model[1].running_var > 0).all()


class Only(fa.Everyone):
    """One free client, with the weight of all priority clients."""

    def __init__(self, k):
        self.k = k

    def select(self, offers, broadcast):
        return Selection((self.k,), weight={self.k: 1.0})


def test_power_of_choice_takes_the_worst_served():
    fed = federation()
    record = run(fa.PowerOfChoice(clients=2), rounds=1, fed=fed).history[0]
    free = record.clients[2:]
    admitted = {c.id for c in free if c.decision == "admitted"}
    assert admitted == {c.id for c in sorted(free, key=lambda c: -c.loss)[:2]}
    # As many as there are: FedAvg on everybody, to the bit. None: FedAvg on the priority clients.
    assert torch.equal(flat(run(fa.PowerOfChoice(3), fed=fed).model), flat(run(fa.Everyone(), fed=fed).model))
    assert torch.equal(flat(run(fa.PowerOfChoice(0), fed=fed).model), flat(run(fa.PriorityOnly(), fed=fed).model))
    with pytest.raises(fa.FedalignError, match="clients must be"):
        fa.PowerOfChoice(-1)


def test_loss_weights_are_proportional_to_loss():
    fed = federation()
    record = run(fa.LossWeighted(power=1), rounds=1, fed=fed).history[0]
    loss = {c.id: c.loss for c in record.clients}
    weight = {c.id: c.weight for c in record.clients}
    for k in (3, 4):
        expected = fed.p[k] * loss[k] / (fed.p[2] * loss[2])
        assert weight[k] / weight[2] == pytest.approx(expected)
    assert math.fsum(weight.values()) == pytest.approx(1)
    assert torch.allclose(
        flat(run(fa.LossWeighted(power=0), fed=fed).model), flat(run(fa.Everyone(), fed=fed).model), atol=1e-7
    )
    inner = run(fa.LossWeighted(power=0, rule=fa.Align(0.3)), fed=fed)
    assert torch.allclose(flat(inner.model), flat(run(fa.Align(0.3), fed=fed).model), atol=1e-7)
    assert [c.decision for c in inner.history[0].clients] == [
        c.decision for c in run(fa.Align(0.3), fed=fed).history[0].clients
    ]


def test_loss_weights_take_over_what_the_inner_rule_is():
    fed = federation()
    inner = fa.Align(0.5, on="accuracy", match_on="train")
    assert fa.LossWeighted(rule=inner).needs_accuracy
    assert fa.LossWeighted(rule=inner).match_on == "train"
    assert not fa.LossWeighted(rule=fa.PriorityOnly()).invites_free
    assert torch.allclose(
        flat(run(fa.LossWeighted(power=0, rule=inner), fed=fed).model), flat(run(inner, fed=fed).model), atol=1e-7
    )
    several = (fa.AutoAlign(), fa.AutoAlign((0, 1)), fa.AutoAlign((0, 1), fallback=False), fa.AutoAlign((0.2,)))
    for other in (fa.GradientAlign(), fa.TrustWeighted(), *several):
        with pytest.raises(fa.FedalignError, match="LossWeighted weighs one selection by losses, so its rule can't be"):
            fa.LossWeighted(rule=other)
    losses = {2: 1e-9, 3: math.inf, 4: 1e5, 5: math.nan}
    offers = {k: Offer(Measure(loss, None, 1)) for k, loss in losses.items()}
    found = fa.LossWeighted(power=100).select(offers, Broadcast(0, 1.0))
    assert found.clients == (2, 4)
    assert all(0 < found.scale[k] < 1e200 for k in (2, 4))

    class Halved(fa.Everyone):
        def select(self, offers, broadcast):
            return Selection(tuple(offers), scale={2: 0.5})

    found = fa.LossWeighted(power=1, rule=Halved()).select({2: Offer(Measure(3.0, None, 1))}, Broadcast(0, 1.0))
    assert found.scale[2] == pytest.approx(1.5)


LIE = 1e300


def test_power_of_choice_does_not_believe_absurd_losses():
    losses = {2: 0.5, 3: LIE, 4: 2.0, 5: -LIE, 6: 9.9}
    offers = {k: Offer(Measure(loss, None, 1)) for k, loss in losses.items()}
    found = fa.PowerOfChoice(clients=2).select(offers, Broadcast(0, 1.0))
    assert found.clients == (4, 6)
    assert found.reasons[3] == "loss 1e+300, more than 10 times F, is not believed"
    assert fa.PowerOfChoice(clients=2, most=5).select(offers, Broadcast(0, 1.0)).clients == (2, 4)
    assert fa.PowerOfChoice(clients=2, most=math.inf).select(offers, Broadcast(0, 1.0)).clients == (3, 6)
    # A loss may be negative, as a log-likelihood is.
    assert fa.PowerOfChoice(clients=2).select(offers, Broadcast(0, -1.0)).clients == (2, 4)
    assert fa.PowerOfChoice(clients=2).select(offers, Broadcast(0, 0.0)).clients == (5,)


@given(
    loss=st.floats(allow_nan=False, allow_infinity=False),
    base=st.floats(-1e6, 1e6),
    power=st.floats(-20, 20),
    most=st.floats(1, 1e6),
)
def test_a_reported_loss_moves_a_weight_by_at_most_the_bound(loss, base, power, most):
    offers = {2: Offer(Measure(loss, None, 1))}
    found = fa.LossWeighted(power, most=most).select(offers, Broadcast(0, base))
    assert 0 <= found.scale[2] <= most


@pytest.mark.parametrize("most", [0, 0.5, math.nan, True, "much"])
@pytest.mark.parametrize("rule", [fa.PowerOfChoice, fa.LossWeighted])
def test_the_bound_on_losses_is_checked(rule, most):
    with pytest.raises(fa.FedalignError, match="most must be a number of at least 1"):
        rule(most=most)


def test_fedavgm_without_momentum_is_fedavg():
    fed = federation()
    plain = run(fa.Everyone(), fed=fed)
    assert torch.allclose(
        flat(run(fa.Everyone(), fed=fed, server=fa.FedAvgM(momentum=0)).model), flat(plain.model), atol=1e-6
    )
    heavy = run(fa.Everyone(), fed=fed, server=fa.FedAvgM(momentum=0.9))
    assert not torch.allclose(flat(heavy.model), flat(plain.model), atol=1e-3)


def test_fedadam_with_a_matching_step_is_fedavg():
    fed = federation()
    plain = run(fa.Everyone(), fed=fed)
    matching = fa.FedAdam(lr=1e4, beta1=0, beta2=0, tau=1e4)
    assert torch.allclose(flat(run(fa.Everyone(), fed=fed, server=matching).model), flat(plain.model), atol=1e-4)


def test_adams_first_step_by_hand():
    adam = fa.FedAdam(lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3)
    new, memory = adam.step(1.0, 3.0, {})
    m, v = memory["first_moment"], memory["second_moment"]
    assert set(memory) == {"first_moment", "second_moment"}
    assert m == pytest.approx(0.2)
    assert v == pytest.approx(0.99e-6 + 0.04)
    assert new == pytest.approx(1 + 0.1 * 0.2 / (math.sqrt(v) + 1e-3))
    # Adam forgets a large second moment at once by its size, Yogi by what came in.
    large = {"first_moment": 0.0, "second_moment": 100.0}
    _, adams = adam.step(0.0, 1.0, large)
    _, yogis = fa.FedYogi().step(0.0, 1.0, large)
    assert adams["second_moment"] == pytest.approx(0.99 * 100 + 0.01)
    assert yogis["second_moment"] == pytest.approx(100 - 0.01)
    with pytest.raises(fa.FedalignError, match=r"server\.beta1 must be in"):
        fa.FedAdam(beta1=1.0)
    with pytest.raises(fa.FedalignError, match=r"server\.lr must be positive"):
        fa.FedYogi(lr=0)


def test_statistics_are_averaged_not_optimised():
    start, mean = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([2.0, 4.0, 9.0])
    new, memory = Partial(fa.FedAvgM(lr=0.5, momentum=0.5), 2).step(start, mean, {})
    assert new.tolist() == [1.5, 3.0, 9.0]
    again, _ = Partial(fa.FedAvgM(lr=0.5, momentum=0.5), 2).step(new, mean, memory)
    assert again.tolist() == [2.0, 4.0, 9.0]

    def normalised():
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))

    result = fa.simulate(federation(), normalised, fa.Everyone(), 3, 0, LOCAL, device="cpu", server=fa.FedAdam())
    assert int(result.model[1].num_batches_tracked) > 0
    assert (result.model[1].running_var > 0).all()


def test_a_servers_memory_survives_an_interruption(tmp_path, monkeypatch):
    settings = ["run", "synth-low", "--arms", "all,gradient", "--seeds", "1", "--rounds", "8", "--quiet"]
    settings += ["--set", "server.kind=fedadam", "--set", "server.lr=0.05", "--set", "data.samples=40"]
    assert_resumes_alike(monkeypatch, tmp_path, settings, round=5)


@pytest.mark.pictures
def test_arms_in_toml(tmp_path, capsys):
    settings = ["run", "synth-low", "--seeds", "1", "--rounds", "3", "--quiet", "--set", "data.samples=40"]
    arms = ["--arms", "auto,gradient,trust,choice,weighted", "--set", "arm.choice.clients=2"]
    more = ["--set", "arm.gradient.threshold=0.5", "--set", "arm.weighted.power=2", "--set", "arm.auto.ladder=[0,0.5]"]
    assert main([*settings, *arms, *more, "--out", str(tmp_path / "a")]) == 0
    for name in ("epsilon-auto.png", "candidates-auto.png", "cost.png"):
        assert (tmp_path / "a" / name).stat().st_size > 10_000
    alone = ["--arms", "auto", "--set", "arm.auto.cosine=false", "--out", str(tmp_path / "alone")]
    assert main([*settings, *alone]) == 0
    assert not any(r.base for r in RunStore(tmp_path / "alone" / "auto" / "seed-0").history().rounds)
    assert main([*settings, "--arms", "choice", "--set", "arm.choice.clients=-2", "--out", str(tmp_path / "b")]) == 2
    assert "clients must be" in capsys.readouterr().err
    assert main([*settings, "--set", "server.kind=fedadm", "--out", str(tmp_path / "c")]) == 2
    assert "did you mean 'fedadam'?" in capsys.readouterr().err
