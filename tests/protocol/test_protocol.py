"""The protocol with made-up replies: models are plain floats or arrays, nothing is trained."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from fedalign import Align, DivergedError, Everyone, FedalignError, Full, Measure, PriorityOnly, Replacement
from fedalign.protocol.federated import alone, federated
from fedalign.protocol.messages import Combine, Combined, Declined, Evaluate, Lost, RoundDone, Train, Update
from fedalign.protocol.plan import Plan, warmup_rounds
from fedalign.protocol.roster import Roster
from fedalign.training.participation import Participation, Presence

ROSTER = Roster(("a", "b", "c", "d", "e"), (True, True, False, False, False), (30, 10, 20, 20, 40))
LOSS = {0: 1.0, 1: 2.0, 2: 1.2, 3: 0.1, 4: 9.0}  # F = .75·1 + .25·2 = 1.25: c is near, d far below, e far above
TRAINED = {0: 10.0, 1: 20.0, 2: 40.0, 3: 1e6, 4: -1e6}


def answer(request, losses=LOSS, trained=TRAINED, lost=()):
    if isinstance(request, Evaluate):
        return [None if k in lost else Measure(losses[k], 0.5, 5) for _, k in request.jobs]
    if isinstance(request, Combine):
        return Combined(tuple(sum(trained[k] * weight for k, weight in mix.items()) for mix in request.mixes))
    assert isinstance(request, Train)
    replies = []
    for _, k in request.jobs:
        own = Measure(losses[k], 0.5, 5)
        if k in lost:
            replies.append(Lost("no answer"))
        elif request.rule is None or ROSTER.priority[k]:
            replies.append(Update(trained[k]))
        elif request.rule.offers(own, request.broadcast):
            replies.append(Update(trained[k], own))
        else:
            replies.append(Declined(own))
    return replies


def play(run, **options):
    """Drive a run to its end; give the result and all requests."""
    requests, reply = [], None
    while True:
        try:
            request = run.send(reply)
        except StopIteration as stop:
            return stop.value, requests
        requests.append(request)
        reply = None if isinstance(request, RoundDone) else answer(request, **options)


def plan(rule, rounds=1, warmup=0, participation=None, **more):
    return Plan(ROSTER, rule, rounds, warmup, participation or Full(), **more)


def decisions(record):
    return [c.decision for c in record.clients]


def test_a_round_of_fedalign_by_hand():
    result, requests = play(federated(plan(Align(0.3)), 0.0))
    record = result.history[0]
    assert record.global_loss == pytest.approx(1.25)
    assert decisions(record) == ["trained", "trained", "admitted", "refused", "declined"]
    # p = .75, .25, .5 over a denominator of 1 + .5
    assert result.model == pytest.approx((0.75 * 10 + 0.25 * 20 + 0.5 * 40) / 1.5, abs=1e-6)
    assert [c.weight for c in record.clients] == pytest.approx([0.5, 1 / 6, 1 / 3, 0, 0])
    assert (record.models_down, record.models_up) == (5, 4)
    assert [type(r).__name__ for r in requests] == [
        "Evaluate",
        "Train",
        "Combine",
        "Evaluate",
        "Evaluate",
        "RoundDone",
    ]
    assert [r.split for r in requests if isinstance(r, Evaluate)] == ["heldout", "test", "train"]


def test_every_client_has_a_reason():
    record = play(federated(plan(Align(0.3)), 0.0))[0].history[0]
    assert record.clients[3].reason == "loss 0.1, not within 0.3 of 1.25"
    assert record.clients[2].reason == "loss 1.2, within 0.3 of 1.25"
    assert all(c.reason for c in record.clients)


@pytest.mark.parametrize(
    ("rule", "expected", "model"),
    [
        (PriorityOnly(), ["trained", "trained", "absent", "absent", "absent"], 0.75 * 10 + 0.25 * 20),
        (
            Everyone(),
            ["trained", "trained", "admitted", "admitted", "admitted"],
            (30 * 10 + 10 * 20 + 20 * 40 + 20 * 1e6 - 40 * 1e6) / 120,
        ),
        (
            Align(math.inf),
            ["trained", "trained", "admitted", "admitted", "admitted"],
            (30 * 10 + 10 * 20 + 20 * 40 + 20 * 1e6 - 40 * 1e6) / 120,
        ),
        (Align(0.0), ["trained", "trained", "refused", "refused", "declined"], 0.75 * 10 + 0.25 * 20),
    ],
)
def test_rules(rule, expected, model):
    result, _ = play(federated(plan(rule), 0.0))
    assert decisions(result.history[0]) == expected
    assert result.model == pytest.approx(model, rel=1e-9)


def test_models_may_be_arrays():
    trained = {k: np.full(3, v) for k, v in TRAINED.items()}
    result, _ = play(federated(plan(Align(0.3)), np.zeros(3)), trained=trained)
    assert result.model == pytest.approx(np.full(3, (0.75 * 10 + 0.25 * 20 + 0.5 * 40) / 1.5))


def test_the_band_is_closed():
    losses = {**LOSS, 2: 1.5, 3: 1.0}  # F = 1.25, so both lie on the edge of ε = 0.25
    record = play(federated(plan(Align(0.25)), 0.0), losses=losses)[0].history[0]
    assert decisions(record)[2:4] == ["admitted", "admitted"]


def test_warmup_is_for_priority_clients():
    result, requests = play(federated(plan(Align(math.inf), rounds=3, warmup=2), 0.0))
    assert [decisions(r)[2] for r in result.history.rounds] == ["absent", "absent", "admitted"]
    assert result.history[0].clients[2].reason.startswith("warm-up")
    trains = [r for r in requests if isinstance(r, Train)]
    assert [len(t.jobs) for t in trains] == [2, 2, 5]


def test_theorem_2_multiset():
    draws = Replacement(3)
    seen = set()
    for seed in range(20):
        presence = draws.draw(0, ROSTER, seed)
        assert presence.draws is not None
        result, _ = play(
            federated(plan(Align(0.3), participation=draws, seed=seed), 0.0), losses={**LOSS, 0: 1.25, 1: 1.25}
        )
        priority = sum(c / 3 * TRAINED[k] for k, c in presence.draws.items())
        free = [k for k in (2, 3, 4) if decisions(result.history[0])[k] == "admitted"]
        total = 1 + sum(float(ROSTER.p[k]) for k in free)
        expected = priority / total + sum(float(ROSTER.p[k]) / total * TRAINED[k] for k in free)
        assert free == [2]
        assert result.model == pytest.approx(expected, abs=1e-6)
        seen.add(tuple(sorted(presence.draws.items())))
    assert len(seen) > 2  # the draws differ from seed to seed, and a client may be drawn more than once


class Fixed(Participation):
    def __init__(self, *rounds):
        self.rounds = rounds

    def draw(self, round, roster, seed):
        return Presence(tuple(k in self.rounds[round] for k in range(len(roster))))


def test_unreachable_priority_clients_leave_the_mean_to_the_others():
    result, _ = play(federated(plan(Align(0.3), participation=Fixed({0, 2})), 0.0))
    record = result.history[0]
    assert record.global_loss == LOSS[0]
    assert decisions(record) == ["trained", "absent", "admitted", "absent", "absent"]
    assert [c.reachable for c in record.clients] == [True, False, True, False, False]
    assert result.model == pytest.approx((0.75 * 10 + 0.5 * 40) / 1.25)


def test_a_round_without_priority_clients_is_skipped_and_said():
    result, requests = play(federated(plan(Align(0.3), rounds=2, participation=Fixed({2, 3}, {0, 1})), 7.0))
    record = result.history[0]
    assert record.skipped == "no priority client was reachable"
    assert (record.global_loss, record.models_up) == (None, 0)
    assert set(decisions(record)) == {"absent"}
    done = [r for r in requests if isinstance(r, RoundDone)]
    assert done[0].model == 7.0
    assert result.history[1].skipped is None


def test_lost_clients_are_recorded():
    record = play(federated(plan(Align(0.3)), 0.0), lost={1, 2})[0].history[0]
    assert decisions(record)[:3] == ["trained", "lost", "lost"]
    assert record.global_loss == LOSS[0]
    all_lost = play(federated(plan(Align(0.3)), 3.0), lost={0, 1})[0]
    assert all_lost.history[0].skipped == "no priority client answered"
    assert all_lost.model == 3.0


def test_divergence_names_round_and_clients():
    run = federated(plan(Everyone(), rounds=5), 0.0)
    combine = run.send(answer(run.send(answer(run.send(None)))))
    assert isinstance(combine, Combine)
    with pytest.raises(DivergedError, match=r"round 0 at client\(s\) d") as error:
        run.send(Combined((1.0,), not_finite=(3,)))
    assert (error.value.round, error.value.clients) == (0, ("d",))


def test_a_loss_that_is_not_finite_stops_the_run():
    with pytest.raises(DivergedError, match=r"client\(s\) b: the model's loss is not finite"):
        play(federated(plan(Align(0.3)), 0.0), losses={**LOSS, 1: math.nan})


def test_a_free_clients_loss_that_is_not_finite_is_declined():
    record = play(federated(plan(Align(0.3)), 0.0), losses={**LOSS, 2: math.nan})[0].history[0]
    assert decisions(record)[2] == "declined"


def test_only_the_admitted_are_combined():
    requests = play(federated(plan(Align(0.3)), 0.0))[1]
    (mix,) = next(r for r in requests if isinstance(r, Combine)).mixes
    assert list(mix) == [0, 1, 2]
    assert math.fsum(mix.values()) == pytest.approx(1.0)


def test_alone_trains_everybody_and_sends_nothing():
    result, requests = play(alone(plan(PriorityOnly(), rounds=2), [0.0] * 5))
    assert result.model == tuple(TRAINED.values())
    assert {d for r in result.history.rounds for d in decisions(r)} == {"trained"}
    assert result.history[0].models_up == 0
    train = [r for r in requests if isinstance(r, Train)]
    assert [m for m, _ in train[1].jobs] == list(TRAINED.values())


def test_a_run_can_start_late():
    result, _ = play(federated(plan(Align(0.3), rounds=5), 0.0, start=3))
    assert [r.round for r in result.history.rounds] == [3, 4]


def test_warmup_forms():
    assert [warmup_rounds(w, 30) for w in (0, 0.1, 3, 0.5, 3.0, 1.0)] == [0, 3, 3, 15, 3, 30]
    for bad in (-1, 0.5 + 1, 31, math.nan, True):
        with pytest.raises(FedalignError, match="warmup"):
            warmup_rounds(bad, 30)


def test_the_protocol_imports_no_training_code():
    code = "import sys, fedalign.protocol.federated; print([m for m in sys.modules if m.startswith(('torch', 'flwr'))])"
    # The package's front door imports torch, so the module is loaded without it.
    code = (
        "import sys, types; p = types.ModuleType('fedalign'); p.__path__ = [sys.argv[1]]; sys.modules['fedalign'] = p;"
        + code
    )
    import fedalign

    done = subprocess.run(
        [sys.executable, "-c", code, fedalign.__path__[0]], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
