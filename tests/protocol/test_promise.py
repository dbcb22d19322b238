"""The bound on how much worse the served model may be: its mathematics, its request, and its coverage by simulation."""

import itertools
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedalign as fa
from fedalign.protocol.messages import Outcomes, Paired, Result, RoundDone, Snapshot, WhoIsThere
from fedalign.protocol.plan import Plan
from fedalign.protocol.promise import (
    chance_worse,
    compare_served,
    log_evidence,
    promise,
    round_weight,
    samples_needed,
    upper_bound,
)
from fedalign.protocol.records import Promise, RoundRecord
from fedalign.protocol.roster import Roster
from fedalign.protocol.round_log import RoundLog
from fedalign.protocol.scores import Scores
from fedalign.testing import MadeUpClients, drive

counts = st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 400)).map(lambda c: (c[0], c[1], sum(c)))


def mean_of(function, n, p_lost, p_gained):
    """Compute the exact mean of a function of the counts, over all samples of n."""
    total = 0.0
    for lost, gained in itertools.product(range(n + 1), repeat=2):
        if lost + gained <= n:
            same = n - lost - gained
            ways = math.comb(n, lost) * math.comb(n - lost, gained)
            p_same = 1 - p_lost - p_gained
            total += ways * p_lost**lost * p_gained**gained * p_same**same * function(lost, gained)
    return total


@pytest.mark.parametrize(("p_lost", "p_gained"), [(0.3, 0.1), (0.05, 0.0), (0.5, 0.5), (0.35, 0.1)])
def test_the_evidence_has_mean_one_at_the_edge_of_the_hypothesis(p_lost, p_gained):
    n, delta = 14, p_lost - p_gained
    mean = mean_of(lambda lost, gained: math.exp(log_evidence(lost, gained, n, delta)), n, p_lost, p_gained)
    assert mean == pytest.approx(1.0)


@pytest.mark.parametrize(("p_lost", "p_gained"), [(0.3, 0.1), (0.05, 0.0), (0.5, 0.5), (0.1, 0.35), (0.9, 0.05)])
@pytest.mark.parametrize("alpha", [0.2, 0.05, 0.001])
def test_the_bound_covers_exactly(p_lost, p_gained, alpha):
    n, D = 25, p_lost - p_gained
    wrong = mean_of(lambda lost, gained: upper_bound(gained, lost, n, -math.log(alpha)) < D, n, p_lost, p_gained)
    assert wrong <= alpha


def test_clients_may_have_different_distributions():
    draw = np.random.default_rng(0)
    lost = np.array([0.0] * 60 + [0.5] * 20)  # the mean is 0.125, and every sample lost comes from one client
    wrong = sum(
        upper_bound(0, int((draw.random(80) < lost).sum()), 80, math.log(10)) < lost.mean() for _ in range(2000)
    )
    assert wrong / 2000 <= 0.1


@given(counts, st.floats(0.1, 50))
def test_the_bound_moves_the_right_way(given, nats):
    gained, lost, n = given
    here = upper_bound(gained, lost, n, nats)
    assert (lost - gained) / n - 1e-8 <= here <= 1
    assert upper_bound(gained, lost, n, nats + 1) >= here
    if lost + gained < n:
        assert upper_bound(gained + 1, lost, n, nats) <= here + 1e-8
        assert upper_bound(gained, lost + 1, n, nats) >= here - 1e-8


@given(counts, st.floats(0, 0.5))
def test_bound_and_chance_agree(given, delta):
    gained, lost, n = given
    chance = chance_worse(Outcomes(gained, lost, n), delta)
    if 0 < chance < 1:
        assert upper_bound(gained, lost, n, -math.log(chance)) == pytest.approx(delta, abs=1e-6)


def test_parts_of_samples_are_allowed():
    """A sequence counts with the part in which models differ; that never makes the bound smaller than it may be."""
    draw = np.random.default_rng(1)
    parts = draw.uniform(0, 0.4, (1000, 50))  # the mean is 0.2
    wrong = sum(upper_bound(0, float(one.sum()), 50, math.log(20)) < 0.2 for one in parts)
    assert wrong <= 50


@pytest.mark.parametrize("rounds", [None, 7])
def test_rounds_share_alpha(rounds):
    assert sum(round_weight(t, rounds) for t in range(rounds or 10_000)) <= 1 + 1e-9


def test_more_certainty_needs_more_samples():
    base = samples_needed(0.02)
    assert samples_needed(0.01) > base
    assert samples_needed(0.02, alpha=0.001) > base
    assert samples_needed(0.02, disagreement=0.2) > base > samples_needed(0.02, disagreement=0.0)
    assert samples_needed(0.02, rounds=40) > base
    assert samples_needed(0.02, rounds=40, log_choices=40 * math.log(8)) > samples_needed(0.02, rounds=40)
    n = samples_needed(0.02, rounds=40)
    assert upper_bound(0.05 * n, 0.05 * n, n, math.log(40 / 0.05)) <= 0.02 + 1e-6


def test_wrong_numbers_are_refused():
    for call in (
        lambda: upper_bound(3, 4, 5, 1.0),
        lambda: upper_bound(-1, 4, 5, 1.0),
        lambda: upper_bound(0, 0, 0, 1.0),
        lambda: samples_needed(0),
        lambda: samples_needed(0.1, alpha=1),
        lambda: samples_needed(0.1, disagreement=2),
        lambda: round_weight(0, 0),
        lambda: log_evidence(0, 0, 5, -0.1),
    ):
        with pytest.raises(fa.FedalignError, match="must be"):
            call()


# --- over rounds ------------------------------------------------------------------------------------------------------


def test_choices_and_evidence_add_up():
    first = promise(0, Promise(), Outcomes(10, 12, 500), math.log(8), rounds=3)
    assert first.worse_by < first.strict
    assert not first.alarm
    second = promise(1, first, Outcomes(0, 90, 500), 2 * math.log(8), rounds=3)
    assert second.alarm
    assert second.evidence > first.evidence
    third = promise(2, second, Outcomes(90, 0, 500), 3 * math.log(8), rounds=3)
    assert third.alarm, "evidence is never lost: the alarm is about all rounds so far"
    assert third.worse_by < 0 < second.worse_by
    assert third.chance < 0.05 < 1 == second.chance


def answered(generator, reply):
    request = next(generator)
    with pytest.raises(StopIteration) as stop:
        generator.send(reply(request))
    return request, stop.value.value


def test_the_request_and_its_answer():
    roster = Roster(("a", "b", "c"), (True, True, False), (30, 20, 10))
    clients = MadeUpClients(roster, outcomes={0: Outcomes(3, 1, 100)}, lost=[2])
    asked = compare_served(0, Promise(), 1.0, 2.0, (0, 1, 2), "heldout", choices=2, lasting=5, rounds=10)
    request, made = answered(asked, clients.answer)
    assert request == Paired((1.0, 2.0), (0, 1, 2), "heldout")
    assert (made.gained, made.lost, made.samples) == (3, 1, 105)
    assert (made.log_choices, made.log_lasting) == pytest.approx((math.log(10), math.log(5)))
    assert made.strict == pytest.approx(upper_bound(3, 1, 105, math.log(10 / 0.05) + math.log(10)))
    assert made.worse_by == pytest.approx(upper_bound(3, 1, 105, math.log(10 / 0.05)))
    asked = compare_served(1, made, 1.0, 2.0, (2,), "heldout", choices=3, lasting=5, rounds=10)
    _, nothing = answered(asked, clients.answer)
    assert nothing.worse_by is nothing.strict is nothing.chance is None
    assert (nothing.log_choices, nothing.log_lasting) == pytest.approx((math.log(75), math.log(25)))


def test_the_own_model_is_not_worse_than_itself():
    own = 2.0
    asked = compare_served(4, Promise(evidence=3.0), own, own, (0,), "heldout", choices=2)
    with pytest.raises(StopIteration) as stop:
        next(asked)
    assert (stop.value.value.worse_by, stop.value.value.strict, stop.value.value.evidence) == (0.0, 0.0, 3.0)


def watched(plan, snapshot):
    """Compare the model 1 with the model 0 in every round, and train nothing."""
    state, history = Promise(**snapshot.values.get("promise", {})), fa.History()
    for t in range(snapshot.round, plan.rounds):
        log = RoundLog(plan, t)
        log.present = yield WhoIsThere(t)
        log.promise = state = yield from compare_served(
            t, state, 1.0, 0.0, log.present.priority, plan.evaluate_on, choices=2, lasting=3, rounds=plan.rounds
        )
        history.rounds.append(log.record(Scores(None, None, None), 1.0))
        yield RoundDone(history[-1], 1.0, Snapshot(t + 1, {"model": 1.0}, {"promise": asdict(state)}))
    return Result(1.0, history)


@pytest.mark.parametrize("lost", [(), (0,)])
def test_an_algorithm_goes_on_where_it_stopped(lost):
    roster, plan = Roster(("a", "b"), (True, False), (30, 20)), Plan(fa.Align(0.1), 4)
    clients = MadeUpClients(roster, outcomes={0: Outcomes(2, 30, 200)}, lost=lost)
    whole = drive(watched(plan, Snapshot(0, {"model": 1.0})), clients)
    stored = json.loads(json.dumps(whole.rounds[1].snapshot.values))
    rest = drive(watched(plan, Snapshot(2, {"model": 1.0}, stored)), clients)
    assert rest.history.rounds == whole.history.rounds[2:]
    assert [r.promise is None for r in whole.history.rounds] == [bool(lost)] * 4
    if not lost:
        assert whole.history[-1].promise.log_choices == pytest.approx(4 * math.log(3) + math.log(2))
        assert whole.history[-1].promise.alarm


def test_records_keep_a_promise_and_old_lines_are_read():
    record = RoundRecord(0, None, 1.0, None, None, None, None, False, None, 1, 1, ())
    assert json.loads(record.to_json())["promise"] is None
    made = replace(record, promise=promise(0, Promise(), Outcomes(3.0, 1.0, 100)))
    assert RoundRecord.from_json(made.to_json()) == made
    old = json.loads(record.to_json())
    del old["promise"]
    assert RoundRecord.from_json(json.dumps(old)) == record
