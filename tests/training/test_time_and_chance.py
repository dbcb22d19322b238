"""Schedules, participation and the hash behind every draw."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import federation, linear
from hypothesis import given
from hypothesis import strategies as st

import fedalign as fa
from fedalign.protocol.roster import Roster
from fedalign.simulation.engine.batches import batches_for
from fedalign.simulation.engine.jobs import Data, TrainJob
from fedalign.training.randomness import Purpose, hashed, permutation, permutations, permutations_on, uniforms
from fedalign.training.schedules import as_schedule

ROSTER = Roster(tuple("abcdefghij"), (True,) * 4 + (False,) * 6, (10, 20, 30, 40, 5, 5, 5, 5, 5, 5))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (fa.Constant(0.3), [0.3, 0.3, 0.3, 0.3, 0.3]),
        (fa.Linear(0.4, 0.0), [0.4, 0.3, 0.2, 0.1, 0.0]),
        (fa.Linear(0.4, 0.2, over=3), [0.4, 0.3, 0.2, 0.2, 0.2]),
        (fa.Cosine(1.0, 0.0), [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        (fa.Exponential(0.8, 0.5), [0.8, 0.4, 0.2, 0.1, 0.05]),
        (fa.Step(1.0, 0.5, every=2), [1, 1, 0.5, 0.5, 0.25]),
        (fa.Piecewise(((0, 0.2), (3, 0.0))), [0.2, 0.2, 0.2, 0.0, 0.0]),
        (fa.InverseTime(mu=0.5, gamma=4), [1, 0.8, 2 / 3, 4 / 7, 0.5]),
        (lambda t: t / 10, [0, 0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_schedules(schedule, expected):
    found = as_schedule(schedule, "epsilon")
    assert [found.at(t, 5) for t in range(5)] == pytest.approx(expected)


def test_a_schedule_ends_where_it_should_and_lasts():
    assert fa.Linear(1, 0.1).at(29, 30) == 0.1
    assert fa.Linear(0.4, 0.1).at(0, 1) == 0.1
    assert fa.Cosine(0.4, 0.0, over=2).at(7, 10) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"schedule": "linaer", "start": 1}, "did you mean 'linear'"),
        ({"schedule": "linear", "strat": 1}, "did you mean 'start'"),
        ({"schedule": "linear"}, "start"),
        ({"schedule": "step", "start": 1, "factor": 0.5, "every": 0}, "every"),
        ({"schedule": "piecewise", "pieces": [[1, 0.2]]}, "start at round 0"),
        ({"start": 1}, "unknown schedule None"),
        ({"schedule": "inverse-time", "mu": 0, "gamma": 1}, "positive"),
    ],
)
def test_bad_schedules(table, message):
    with pytest.raises(fa.FedalignError, match=message):
        as_schedule(table, "epsilon")


def test_the_learning_rate_counts_local_steps_where_the_theory_does():
    local = fa.LocalSGD(lr=fa.InverseTime(mu=1.0, gamma=10.0), steps=4)
    assert [local.rate(2, 5, s, 4) for s in range(4)] == [2 / (8 + s + 10) for s in range(4)]
    by_round = fa.LocalSGD(lr=fa.Linear(0.4, 0.0), epochs=1)
    assert by_round.rate(1, 5, 3, 4) == pytest.approx(0.3)


def test_epsilon_may_be_a_schedule_or_a_callable():
    fed = federation()
    for epsilon in (fa.Linear(0.5, 0.0), lambda t: 0.5 * (1 - t / 9)):
        history = fa.simulate(fed, linear, fa.Align(epsilon), rounds=10).history
        assert [r.epsilon for r in history.rounds] == pytest.approx([0.5 * (1 - t / 9) for t in range(10)])


def test_uniform_draws_a_fraction_without_replacement():
    counts = np.zeros(10)
    for t in range(400):
        presence = fa.Uniform(0.3).draw(t, ROSTER, seed=1)
        assert sum(presence.reachable) == 3
        counts += presence.reachable
    assert np.all(np.abs(counts / 400 - 0.3) < 0.1)
    assert fa.Uniform(0.3).draw(5, ROSTER, 1) == fa.Uniform(0.3).draw(5, ROSTER, 1)
    assert sum(fa.Uniform(0.01).draw(0, ROSTER, 1).reachable) == 1
    assert all(fa.Uniform(1.0).draw(0, ROSTER, 1).reachable)


def test_replacement_draws_priority_clients_in_proportion():
    counts = np.zeros(10)
    for t in range(500):
        presence = fa.Replacement(4).draw(t, ROSTER, seed=0)
        assert sum(presence.draws.values()) == 4
        assert all(presence.reachable[4:])
        assert [k for k in range(4) if presence.reachable[k]] == sorted(presence.draws)
        for k, c in presence.draws.items():
            counts[k] += c
    assert np.all(np.abs(counts[:4] / 2000 - ROSTER.p[:4]) < 0.04)
    assert counts[4:].sum() == 0


def test_evaluators_are_drawn_anew_where_trainers_are_drawn():
    for pattern in (fa.Uniform(0.3), fa.Replacement(4)):
        pairs = [(pattern.draw(t, ROSTER, 1), pattern.draw_evaluators(t, ROSTER, 1)) for t in range(50)]
        assert any(trainers != evaluators for trainers, evaluators in pairs)
        assert pattern.draw_evaluators(3, ROSTER, 1) == pattern.draw_evaluators(3, ROSTER, 1)
        if isinstance(pattern, fa.Uniform):
            assert {sum(evaluators.reachable) for _, evaluators in pairs} == {sum(pairs[0][0].reachable)}
    for pattern in (fa.Full(), fa.Bernoulli(0.5)):
        assert pattern.draw_evaluators(0, ROSTER, 1) is None


def test_bernoulli_leaves_priority_clients_alone():
    draws = np.array([fa.Bernoulli(0.25).draw(t, ROSTER, 0).reachable for t in range(400)])
    assert draws[:, :4].all()
    assert np.all(np.abs(draws[:, 4:].mean(0) - 0.25) < 0.08)
    assert not any(fa.Bernoulli(0.0).draw(0, ROSTER, 0).reachable[4:])


def trace(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_trace(tmp_path):
    path = trace(tmp_path, "round,client\n0,a\n0,4\n2,b\n\n2,e\n")
    once, again = fa.Trace(path), fa.Trace(path, repeat=True)
    there = [[k for k in range(10) if once.draw(t, ROSTER, 0).reachable[k]] for t in range(4)]
    assert there == [[0, 4], [], [1, 4], []]
    assert again.draw(3, ROSTER, 0) == once.draw(0, ROSTER, 0)


def test_a_traces_names_win_over_numbers(tmp_path):
    roster = Roster(("1", "2", "ten"), (True, False, False), (1, 1, 1))
    presence = fa.Trace(trace(tmp_path, "\ufeffround,client\n0,1\n0,0\n1,2\n")).draw(0, roster, 0)
    assert presence.reachable == (True, False, False)  # 1 is a name; 0 is no name, so it is a number: the same client


def test_seeds_matter():
    fed = federation()
    starts = [
        fa.simulate(fed, linear, rounds=1, warmup=0, seed=s, local=fa.LocalSGD(lr=1e-9, steps=1)).model for s in (0, 1)
    ]
    assert not starts[0].weight.allclose(starts[1].weight, atol=1e-3)
    draws = [[fa.Uniform(0.3).draw(t, ROSTER, seed).reachable for t in range(5)] for seed in (0, 1)]
    assert draws[0] != draws[1]


@given(
    n=st.integers(1, 23), batch=st.sampled_from([None, 1, 4, 50]), epochs=st.integers(1, 3), other=st.integers(1, 30)
)
def test_batches(n, batch, epochs, other):
    """An epoch is a permutation of the client's rows; only its last batch may be smaller; jobs don't meddle."""
    pool = fa.Pool(torch.zeros(100, 1), torch.zeros(100))
    data = Data([pool], torch.device("cpu"), torch.float32)
    local = fa.LocalSGD(lr=0.1, epochs=epochs, batch_size=batch)
    mine, others = np.arange(10, 10 + n), np.arange(50, 50 + other)

    def table(*jobs):
        batches = batches_for([TrainJob(torch.zeros(1), pool, rows, local, 0, r, 9, k) for rows, r, k in jobs], data)
        return [[batches.rows[0, s, : batches.counts[0, s]].tolist() for s in range(batches.rows.shape[1])], batches]

    steps, _ = table((mine, 2, 5))
    size = batch or n
    for epoch in range(epochs):
        per_epoch = -(-n // size)
        part = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(row for step in part for row in step) == mine.tolist()
        assert [len(p) for p in part] == [size] * (n // size) + [n % size] * (n % size > 0)
    together, _ = table((mine, 2, 5), (others, 1, 0))
    assert [step for step in together if step] == [step for step in steps if step]


def test_the_order_of_batches_differs_by_epoch_round_client_and_seed():
    pool = fa.Pool(torch.zeros(100, 1), torch.zeros(100))
    data = Data([pool], torch.device("cpu"), torch.float32)
    local = fa.LocalSGD(lr=0.1, epochs=2, batch_size=30)

    def order(seed, round, client):
        job = TrainJob(torch.zeros(1), pool, np.arange(30), local, seed, round, 9, client)
        return [tuple(row) for row in batches_for([job], data).rows[0].tolist()]

    seen = [order(0, 0, 0), order(1, 0, 0), order(0, 1, 0), order(0, 0, 1)]
    assert len({epoch for epochs in seen for epoch in epochs}) == 8
    assert order(0, 1, 0) == seen[2]


def test_trace_drives_a_run(tmp_path):
    path = trace(tmp_path, "round,client\n0,0\n0,2\n1,3\n2,1\n")
    result = fa.simulate(federation(), linear, fa.Everyone(), rounds=3, warmup=0, participation=fa.Trace(path))
    assert [r.skipped is None for r in result.history.rounds] == [True, False, True]
    assert [c.decision for c in result.history[0].clients] == ["trained", "absent", "admitted", "absent", "absent"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,round\n", "must be 'round,client'"),
        ("", "must be 'round,client'"),
        ("round,client\n", "no client in any round"),
        ("round,client\n0,a\nx,b\n", "line 3: 'x,b'"),
        ("round,client\n-1,a\n", "line 2"),
        ("round,client\n0\n", "line 2"),
    ],
)
def test_unreadable_traces(tmp_path, text, message):
    with pytest.raises(fa.FedalignError, match=message):
        fa.Trace(trace(tmp_path, text))


def test_more_unreadable_traces(tmp_path):
    with pytest.raises(fa.FedalignError, match="cannot read trace"):
        fa.Trace(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(fa.FedalignError, match="cannot read trace"):
        fa.Trace(tmp_path / "binary.csv")
    stranger = fa.Trace(trace(tmp_path, "round,client\n3,zoe\n"))
    with pytest.raises(fa.FedalignError, match="round 3 names client 'zoe'"):
        fa.simulate(federation(), linear, participation=stranger)


@pytest.mark.parametrize(
    "make",
    [lambda: fa.Uniform(0.0), lambda: fa.Uniform(1.1), lambda: fa.Uniform(float("nan")), lambda: fa.Replacement(0),
     lambda: fa.Replacement(1.5), lambda: fa.Bernoulli(-0.1), lambda: fa.Bernoulli(2)],
)  # fmt: skip
def test_bad_participation(make):
    with pytest.raises(fa.FedalignError):
        make()


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 2**40))
def test_permutations_are_permutations_and_depend_on_their_own_row_alone(lengths, seed):
    keys = hashed(seed, Purpose.BATCHES, np.arange(len(lengths)))
    rows = permutations(keys, np.array(lengths))
    for r, n in enumerate(lengths):
        assert sorted(rows[r, :n].tolist()) == list(range(n))
        assert rows[r, :n].tolist() == permutation(n, seed, Purpose.BATCHES, r).tolist()
    signed = permutations_on(torch.device("cpu"), keys, np.array(lengths))
    for r, n in enumerate(lengths):
        assert signed[r, :n].tolist() == rows[r, :n].tolist()


def test_draws_look_uniform_and_purposes_differ():
    u = uniforms(0, Purpose.DATA, np.arange(20_000))
    assert abs(u.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    assert u.min() >= 0
    assert u.max() < 1
    assert hashed(0, Purpose.DATA, 1) != hashed(0, Purpose.SPLIT, 1)
    assert hashed(1, 0) != hashed(0, 1)
    first = np.array([permutation(5, s)[0] for s in range(2000)])
    assert np.all(np.abs(np.bincount(first) / 2000 - 0.2) < 0.04)
