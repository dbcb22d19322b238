"""Identities that hold to the last bit, and the decisions they rest on."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import blobs, federation, flat, linear

import fedalign as fa
from fedalign.simulation.engine.batched import BatchedEngine

LOCAL = fa.LocalSGD(lr=0.2, epochs=2, batch_size=10)


def run(fed, rule, engine="batched", **options):
    return fa.simulate(fed, linear, rule, device="cpu", engine=engine, **{"rounds": 12, "local": LOCAL, **options})


def decisions(result, k):
    return {r.clients[k].decision for r in result.history.rounds}


@pytest.mark.parametrize("engine", ["batched", "reference"])
def test_epsilon_zero_is_fedavg_on_priority_bit_for_bit(engine):
    fed = federation()
    aligned = run(fed, fa.Align(0.0), engine)
    alone = run(fed, fa.PriorityOnly(), engine)
    assert torch.equal(flat(aligned.model), flat(alone.model))
    offered = {c.decision for r in aligned.history.rounds for c in r.clients if not c.priority}
    assert "refused" in offered  # some free client was below F and offered: it changed nothing


def test_epsilon_zero_is_fedavg_on_priority_also_when_runs_share_batches():
    fed = federation()
    specs = [
        fa.RunSpec(fed, rule, 12, 0.1, LOCAL, seed=3) for rule in (fa.Everyone(), fa.Align(0.0), fa.PriorityOnly())
    ]
    _, aligned, alone = fa.simulate_many(specs, linear, device="cpu")
    assert torch.equal(flat(aligned.model), flat(alone.model))


@pytest.mark.parametrize("engine", ["batched", "reference"])
def test_epsilon_infinity_is_fedavg_on_all(engine):
    fed = federation()
    aligned = run(fed, fa.Align(math.inf), engine, warmup=0)
    everybody = run(fed, fa.Everyone(), engine, warmup=0)
    assert torch.equal(flat(aligned.model), flat(everybody.model))


def test_fedavg_on_all_is_the_weighted_mean_of_clients_trained_alone():
    fed = federation()
    once = run(fed, fa.Everyone(), rounds=1, warmup=0)
    alone = run(fed, fa.Alone(), rounds=1)
    D = torch.tensor(fed.roster.samples, dtype=torch.float64)
    mean = sum(d * flat(m) for d, m in zip(D, alone.model, strict=True)) / D.sum()
    assert torch.allclose(flat(once.model), mean, atol=1e-6)


def test_a_client_far_below_offers_and_is_refused_one_far_above_declines_and_trains_nothing(monkeypatch):
    x, y = blobs(60, 1)
    easy = (3 * x[:20], y[:20])  # large margins and no noise: a loss near 0 once the task is learnt
    hard = (x[20:40], (y[20:40] + 2) % 4)
    noisy = blobs(300, 2, shift=0.2)
    fed = fa.Federation.from_arrays([noisy, easy, hard], priority=[True, False, False])
    trained = set()
    original = BatchedEngine.train

    def watch(self, jobs):
        trained.update(job.client for job in jobs)
        return original(self, jobs)

    monkeypatch.setattr(BatchedEngine, "train", watch)
    result = run(fed, fa.Align(0.3), rounds=30, warmup=10)
    last = result.history[-1]
    assert last.clients[1].loss < last.global_loss - 0.3
    assert last.clients[2].loss > last.global_loss + 0.3
    assert [c.decision for c in last.clients] == ["trained", "refused", "declined"]
    assert decisions(result, 2) == {"absent", "declined"}
    assert trained == {0}
    assert [c.weight for c in last.clients] == [1.0, 0.0, 0.0]


def test_matching_on_accuracy():
    fed = federation(sizes=(90, 60, 60, 60, 60), shifts=(0.3, 0.3, 0.0, 0.35, 1.0))
    result = run(fed, fa.Align(0.1, on="accuracy"), rounds=30)
    for r in result.history.rounds[3:]:
        for c in r.clients[2:]:
            inside = abs(c.accuracy - r.global_accuracy) <= 0.1 + 1e-9
            offers = c.accuracy >= r.global_accuracy - 0.1 - 1e-9
            assert c.decision == ("admitted" if inside else "refused" if offers else "declined")
    seen = {c.decision for r in result.history.rounds[3:] for c in r.clients[2:]}
    assert seen == {"admitted", "refused", "declined"}


def test_exact_ties_of_accuracy_are_inside():
    rule = fa.Align(0.1, on="accuracy")
    broadcast = fa.Broadcast(0, 1.0, accuracy=0.8, epsilon=0.1)
    for accuracy in (0.7, 0.9):
        assert rule.offers(fa.Measure(1.0, accuracy, 10), broadcast)
        assert rule.admits(fa.Measure(1.0, accuracy, 10), broadcast)


def test_matching_on_training_data():
    fed = federation()
    held, train = run(fed, fa.Align(0.3)), run(fed, fa.Align(0.3, match_on="train"))
    assert held.history[5].global_loss != train.history[5].global_loss
    nothing_held = federation(heldout_fraction=0.0)
    result = run(nothing_held, fa.Align(0.3))
    assert result.history[5].global_loss == pytest.approx(result.history[4].train_loss, rel=1e-6)
    with pytest.raises(fa.FedalignError, match="needs held-out data"):
        run(nothing_held, fa.Align(0.3, match_on="heldout"))


def test_same_seed_same_everything_other_seed_other_weights():
    fed = federation()
    first, second, third = (run(fed, fa.Align(0.3), seed=s) for s in (1, 1, 2))
    assert torch.equal(flat(first.model), flat(second.model))
    assert [r.to_json() for r in first.history.rounds] == [r.to_json() for r in second.history.rounds]
    assert not torch.equal(flat(first.model), flat(third.model))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_other_chunk_sizes_give_the_same_decisions(chunk):
    fed = federation(sizes=(90, 60, 60, 61, 59), shifts=(0.3, 0.3, 0.0, 0.35, 1.0))
    whole, cut = run(fed, fa.Align(0.2), rounds=25), run(fed, fa.Align(0.2), rounds=25, chunk=chunk)
    assert {c.decision for r in whole.history.rounds for c in r.clients} >= {"admitted", "refused", "declined"}
    assert [[c.decision for c in r.clients] for r in whole.history.rounds] == [
        [c.decision for c in r.clients] for r in cut.history.rounds
    ]
    assert torch.equal(flat(whole.model), flat(cut.model))


@pytest.mark.parametrize("chunk", [1, 2, 5, 7])
def test_a_clients_bits_do_not_depend_on_its_neighbours(chunk):
    """At lr 0.5 this network amplifies the last bit of a sum to another model within a few rounds."""
    sizes = (1, 7, 30, 50, 51, 120, 33)
    fed = federation(sizes, priority=(True,) * 3 + (False,) * 4, shifts=(0.2,) * 7)

    def network():
        return torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.ReLU(), torch.nn.Linear(20, 4))

    for batch_size in (20, None):
        local = fa.LocalSGD(lr=0.5, epochs=3, batch_size=batch_size)
        runs = [fa.simulate(fed, network, fa.Everyone(), 5, 0, local, device="cpu", chunk=c) for c in (None, chunk)]
        assert torch.equal(flat(runs[0].model), flat(runs[1].model))


def test_a_users_rule_needs_two_methods():
    class Better(fa.Rule):
        def offers(self, own, broadcast):
            return own.loss <= broadcast.loss

        def select(self, offers, broadcast):
            return fa.Selection(tuple(k for k, offer in offers.items() if offer.measure.samples >= 5))

    result = run(federation(), Better(), rounds=20)
    seen = {c.decision for r in result.history.rounds for c in r.clients if not c.priority}
    assert seen <= {"absent", "declined", "admitted", "refused"}
    assert "admitted" in seen
    assert result.history[-1].epsilon is None


def test_to_frame_has_rounds_times_clients():
    frame = run(federation(), fa.Align(0.3), rounds=4).history.to_frame()
    assert len(frame) == 4 * 5
    assert {"round", "epsilon", "global_loss", "test_accuracy", "id", "priority", "loss", "decision", "weight"} <= set(
        frame
    )
    assert frame.groupby("round")["weight"].sum().tolist() == pytest.approx([1.0] * 4)
