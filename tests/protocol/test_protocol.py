"""The algorithms with made-up clients: models are plain floats or arrays, nothing is trained."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

import fedalign
from fedalign import Align, Alone, DivergedError, Everyone, FedalignError, Measure, PriorityOnly, Replacement
from fedalign.protocol.messages import Aggregate, Evaluate, Invite, Refused, Snapshot, TrainAlone
from fedalign.protocol.plan import Plan, warmup_rounds
from fedalign.protocol.roster import Roster
from fedalign.testing import MadeUpClients, play
from fedalign.training.participation import Participation, Presence

ROSTER = Roster(("a", "b", "c", "d", "e"), (True, True, False, False, False), (30, 10, 20, 20, 40))
LOSS = {0: 1.0, 1: 2.0, 2: 1.2, 3: 0.1, 4: 9.0}  # F = .75·1 + .25·2 = 1.25: c is near, d far below, e far above
TRAINED = {0: 10.0, 1: 20.0, 2: 40.0, 3: 1e6, 4: -1e6}
NOT_FINITE = "its trained weights are not finite"


def clients(losses=LOSS, trained=TRAINED, **options):
    return MadeUpClients(ROSTER, losses, trained, **options)


def decisions(record):
    return [c.decision for c in record.clients]


def test_a_round_of_fedalign_by_hand():
    played = play(Align(0.3), clients())
    record = played.history[0]
    assert record.global_loss == pytest.approx(1.25)
    assert decisions(record) == ["trained", "trained", "admitted", "refused", "declined"]
    # p = .75, .25, .5 over a denominator of 1 + .5
    assert played.model == pytest.approx((0.75 * 10 + 0.25 * 20 + 0.5 * 40) / 1.5, abs=1e-6)
    assert [c.weight for c in record.clients] == pytest.approx([0.5, 1 / 6, 1 / 3, 0, 0])
    assert (record.models_down, record.models_up) == (5, 4)
    assert [type(r).__name__ for r in played.requests] == [
        "WhoIsThere",
        "Evaluate",
        "Invite",
        "Aggregate",
        "Evaluate",
        "Evaluate",
        "RoundDone",
    ]
    assert [r.split for r in played.requests if isinstance(r, Evaluate)] == ["heldout", "test", "train"]


def test_every_client_has_a_reason():
    record = play(Align(0.3), clients()).history[0]
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
    result = play(rule, clients())
    assert decisions(result.history[0]) == expected
    assert result.model == pytest.approx(model, rel=1e-9)


def test_models_may_be_arrays():
    trained = {k: np.full(3, v) for k, v in TRAINED.items()}
    result = play(Align(0.3), clients(trained=trained), np.zeros(3))
    assert result.model == pytest.approx(np.full(3, (0.75 * 10 + 0.25 * 20 + 0.5 * 40) / 1.5))


def test_the_band_is_closed():
    losses = {**LOSS, 2: 1.5, 3: 1.0}  # F = 1.25, so both lie on the edge of ε = 0.25
    record = play(Align(0.25), clients(losses)).history[0]
    assert decisions(record)[2:4] == ["admitted", "admitted"]


def test_warmup_is_for_priority_clients():
    result = play(Plan(Align(math.inf), rounds=3, warmup=2), clients())
    assert [decisions(r)[2] for r in result.history.rounds] == ["absent", "absent", "admitted"]
    assert result.history[0].clients[2].reason.startswith("warm-up")
    invited = [r.clients for r in result.requests if isinstance(r, Invite)]
    assert [len(clients) for clients in invited] == [2, 2, 5]


def test_theorem_2_multiset():
    draws = Replacement(3)
    seen = set()
    for seed in range(20):
        presence = draws.draw(0, ROSTER, seed)
        assert presence.draws is not None
        result = play(Align(0.3), clients({**LOSS, 0: 1.25, 1: 1.25}, participation=draws, seed=seed))
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
    result = play(Align(0.3), clients(participation=Fixed({0, 2})))
    record = result.history[0]
    assert record.global_loss == LOSS[0]
    assert decisions(record) == ["trained", "absent", "admitted", "absent", "absent"]
    assert [c.reachable for c in record.clients] == [True, False, True, False, False]
    assert result.model == pytest.approx((0.75 * 10 + 0.5 * 40) / 1.25)


def test_a_round_without_priority_clients_is_skipped_and_said():
    result = play(Align(0.3), clients(participation=Fixed({2, 3}, {0, 1})), 7.0, rounds=2)
    record = result.history[0]
    assert record.skipped == "no priority client was reachable"
    assert (record.global_loss, record.models_up) == (None, 0)
    assert set(decisions(record)) == {"absent"}
    assert result.rounds[0].model == 7.0
    assert result.history[1].skipped is None


def test_lost_clients_are_recorded():
    record = play(Align(0.3), clients(lost={1, 2})).history[0]
    assert decisions(record)[:3] == ["trained", "lost", "lost"]
    assert record.global_loss == LOSS[0]
    all_lost = play(Align(0.3), clients(lost={0, 1}), 3.0)
    assert all_lost.history[0].skipped == "no priority client answered"
    assert all_lost.model == 3.0


def test_divergence_names_round_and_clients():
    with pytest.raises(DivergedError, match=r"round 0 at client\(s\) b: the trained weights are not finite") as error:
        play(Everyone(), clients(refused={1: NOT_FINITE}), rounds=5)
    assert (error.value.round, error.value.clients) == (0, ("b",))


@pytest.mark.parametrize("rule", [Everyone(), Align(math.inf)])
def test_a_free_client_that_diverges_is_refused_and_the_round_goes_on(rule):
    played = play(rule, clients(refused={3: NOT_FINITE}))
    record = played.history[0]
    assert decisions(record) == ["trained", "trained", "admitted", "refused", "admitted"]
    assert record.clients[3].reason == NOT_FINITE
    assert record.clients[3].weight == 0.0
    assert played.model == pytest.approx((30 * 10 + 10 * 20 + 20 * 40 - 40 * 1e6) / 100, rel=1e-9)
    # Asked for the aggregate of all, the driver refuses d; then the others are asked for.
    mixes = [list(r.mixes[0].shares) for r in played.requests if isinstance(r, Aggregate)]
    assert mixes == [[0, 1, 2, 3, 4], [0, 1, 2, 4]]
    assert (record.models_down, record.models_up) == (5, 5)  # d's update was sent


def test_an_update_that_fails_the_checks_on_arrival_is_refused():
    class Short(MadeUpClients):
        def reply(self, request, client):
            own = Measure(LOSS[client], 0.5, 5)
            return Refused(own, "its model is too short") if client == 2 else super().reply(request, client)

    played = play(Align(0.3), Short(ROSTER, LOSS, TRAINED))
    assert decisions(played.history[0]) == ["trained", "trained", "refused", "refused", "declined"]
    assert played.history[0].clients[2].reason == "its model is too short"
    assert played.model == pytest.approx(0.75 * 10 + 0.25 * 20)


def test_a_loss_that_is_not_finite_stops_the_run():
    with pytest.raises(DivergedError, match=r"client\(s\) b: the model's loss is not finite"):
        play(Align(0.3), clients({**LOSS, 1: math.nan}))


def test_a_free_clients_loss_that_is_not_finite_is_declined():
    record = play(Align(0.3), clients({**LOSS, 2: math.nan})).history[0]
    assert decisions(record)[2] == "declined"


def test_only_the_admitted_are_aggregated():
    requests = play(Align(0.3), clients()).requests
    (mix,) = next(r for r in requests if isinstance(r, Aggregate)).mixes
    assert list(mix.shares) == [0, 1, 2]
    assert math.fsum(mix.shares.values()) == pytest.approx(1.0)


def test_alone_trains_everybody_and_sends_nothing():
    result = play(Alone(), clients(), rounds=2)
    assert result.model == tuple(TRAINED.values())
    assert {d for r in result.history.rounds for d in decisions(r)} == {"trained"}
    assert result.history[0].models_up == 0
    train = [r for r in result.requests if isinstance(r, TrainAlone)]
    assert [r.models for r in train] == [dict.fromkeys(range(5), 0.0), TRAINED]


def test_alone_goes_on_from_a_snapshot():
    class Grow(MadeUpClients):
        def train(self, model, client):
            return model + client

    straight = play(Alone(), Grow(ROSTER, LOSS), rounds=4)
    assert straight.model == (0.0, 4.0, 8.0, 12.0, 16.0)
    at = straight.rounds[1].snapshot
    assert at.tensors == {f"client-{k}": 2.0 * k for k in range(5)}
    later = play(Alone(), Grow(ROSTER, LOSS), rounds=4, snapshot=at)
    assert later.model == straight.model
    assert later.history.rounds == straight.history.rounds[2:]


def test_a_client_that_diverges_alone_is_named():
    with pytest.raises(DivergedError, match=r"round 0 at client\(s\) d: the trained weights are not finite"):
        play(Alone(), clients(trained={**TRAINED, 3: None}), rounds=2)


def test_a_run_can_start_late():
    result = play(Align(0.3), clients(), rounds=5, snapshot=Snapshot(3, {"model": 0.0}))
    assert [r.round for r in result.history.rounds] == [3, 4]


def test_warmup_forms():
    assert [warmup_rounds(w, 30) for w in (0, 0.1, 3, 0.5, 3.0, 1.0)] == [0, 3, 3, 15, 3, 30]
    for bad in (-1, 0.5 + 1, 31, math.nan, True):
        with pytest.raises(FedalignError, match="warmup"):
            warmup_rounds(bad, 30)


def test_the_protocol_imports_no_training_code():
    # The package's front door imports torch, so the modules are loaded without it.
    code = """if True:
        import sys, types
        package = types.ModuleType("fedalign")
        package.__path__ = [sys.argv[1]]
        sys.modules["fedalign"] = package
        import fedalign.protocol.autoalign, fedalign.protocol.fedalign, fedalign.protocol.local_only
        print([module for module in sys.modules if module.startswith(("torch", "flwr"))])
    """
    done = subprocess.run(
        [sys.executable, "-c", code, fedalign.__path__[0]], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
