"""Verified rounds with made-up clients: models are numbers, and what the priority clients measure decides."""

import json
import math
from dataclasses import replace

import pytest

import fedalign as fa
from fedalign.protocol.contributions import Contributions, order, reputations, usual_limit
from fedalign.protocol.fallback import assess
from fedalign.protocol.head_start import averaged
from fedalign.protocol.messages import (
    Aggregate,
    Compare,
    Compared,
    Evaluate,
    Invite,
    Lost,
    Outcomes,
    Snapshot,
    WhoIsThere,
)
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import Fallback
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Measure, Similarity
from fedalign.rules.verified import Verified
from fedalign.testing import MadeUpClients, play

BEST = 100.0


class Line(MadeUpClients):
    """Models are numbers, and the loss is the distance to 100. Each client adds its own number to the model.

    ``moves`` maps a client to a number, or to a function of the round. Evaluators are silent in the rounds ``silent``.
    """

    def __init__(self, moves, priority=2, samples=None, silent=(), accuracy=None, **options):
        roster = Roster(
            tuple(f"c{k}" for k in range(len(moves))),
            tuple(k < priority for k in range(len(moves))),
            samples or (10,) * len(moves),
        )
        super().__init__(roster, **options)
        self.moves, self.silent, self.accuracy, self.round = moves, silent, accuracy, 0
        self.deciding = False

    def move(self, client):
        move = self.moves[client]
        return move(self.round) if callable(move) else move

    def measure(self, model, client, split):
        if client in self._lost or (self.round in self.silent and self.deciding):
            return None
        return Measure(abs(BEST - model), None if self.accuracy is None else self.accuracy(model), 5)

    def train(self, model, client):
        return model + self.move(client)

    def similarity(self, client):
        mean = sum(self.move(k) for k in range(len(self.moves)) if self.roster.priority[k])
        return Similarity(math.copysign(1.0, self.move(client) * mean), abs(self.move(client)))

    def answer(self, request):
        if isinstance(request, WhoIsThere):
            self.round, self.deciding = request.round, request.purpose == "evaluate"
        return super().answer(request)


def decisions(played, round=-1):
    return [client.decision for client in played.history.rounds[round].clients]


def asked(played, kind):
    return [request for request in played.requests if isinstance(request, kind)]


def test_a_client_that_helps_is_admitted_and_one_that_harms_is_not():
    played = play(Verified(), Line([1.0, 1.0, 2.0, -2.0]))
    assert decisions(played) == ["trained", "trained", "admitted", "refused"]
    reasons = [client.reason for client in played.history[0].clients]
    assert reasons[2].startswith("with it, the priority clients' loss changes by -")
    assert reasons[3].startswith("with it, the priority clients' loss changes by +")
    assert played.model == pytest.approx((10 + 10 + 20) / 30)


def test_updates_are_shortened_to_a_multiple_of_the_priority_clients_median_length():
    long = play(Verified(length=2.0), Line([1.0, 1.0, 50.0]))
    assert asked(long, Aggregate)[0].mixes[-1].step == {2: pytest.approx(2 / 50)}
    assert long.model == pytest.approx((1 + 1 + 2) / 3)


def test_all_free_clients_together_weigh_at_most_the_total():
    played = play(Verified(total=0.5), Line([1.0, 1.0, 2.0, 2.0]))
    assert sum(client.weight for client in played.history[0].clients[2:]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("inner", [fa.Everyone(), fa.LossWeighted()])
def test_a_sample_count_that_nobody_can_check_brings_little_weight(inner):
    clients = Line([1.0, 1.0, 2.0, 2.0], samples=(10, 30, 10, 10**9))
    played = play(Verified(inner, each=2.0), clients)
    weights = [client.weight for client in played.history[0].clients]
    assert weights[3] <= 2.0 * (weights[0] + weights[1]) / 2 + 1e-9
    assert weights[2] > 0.05


@pytest.mark.parametrize("free", [0, 1, 2, 3])
@pytest.mark.parametrize("priority", [1, 2])
def test_few_clients(priority, free):
    played = play(Verified(), Line([1.0] * priority + [2.0] * free, priority=priority), rounds=3)
    assert decisions(played) == ["trained"] * priority + ["admitted"] * free
    hostile = play(Verified(), Line([1.0] * priority + [-2.0] * free, priority=priority), rounds=3)
    assert hostile.model == 3.0
    assert decisions(hostile) == ["trained"] * priority + ["refused"] * free


def test_a_hostile_majority_changes_nothing():
    alone = play(fa.PriorityOnly(), Line([1.0, 1.0]), rounds=6)
    played = play(Verified(), Line([1.0, 1.0, *[-2.0] * 9]), rounds=6)
    assert played.model == alone.model


def test_a_client_that_adds_nothing_is_left_out():
    played = play(Verified(), Line([1.0, 1.0, 0.0, 0.0]))
    assert played.model == 1.0
    assert [client.reason for client in played.history[0].clients[2:]] == ["its update is zero"] * 2


def test_an_update_too_short_to_be_stretched_is_left_out():
    """Its numbers would overflow at the usual length, and a resemblance that is not a number finds no colluders."""
    played = play(Verified(), Line([1.0, 1.0, 2.0, 1e-45]))
    assert decisions(played) == ["trained", "trained", "admitted", "refused"]
    assert played.history[0].clients[3].reason == "its update is zero"


def test_a_loss_below_zero_keeps_nobody_from_being_trained_on():
    class Shifted(Line):
        def measure(self, model, client, split):
            return Measure(super().measure(model, client, split).loss - 1000, None, 5)

    shifted, plain = (
        play(Verified(calibrated=False), kind([1.0, 1.0, *[2.0] * 4]), rounds=4) for kind in (Shifted, Line)
    )
    assert shifted.model == plain.model
    assert all(record.inclusion < 1 for record in shifted.history.rounds)  # free clients are trained on


def test_priority_updates_of_length_zero_leave_nothing_to_add():
    played = play(Verified(), Line([0.0, 0.0, 2.0]))
    assert played.model == 0.0


def test_a_strike_after_many_good_rounds_is_not_served():
    def turncoat(round):
        return 2.0 if round < 9 else -2.0

    moves = [1.0, 1.0, *[turncoat] * 6]
    before, after = (play(Verified(), Line(moves), rounds=rounds) for rounds in (9, 10))
    assert after.model > before.model > 9
    assert decisions(after) == ["trained"] * 2 + ["refused"] * 6


def test_one_that_turns_in_the_last_round_finds_no_credit_in_a_fallback():
    """Seen with credit, a strike after 30 good rounds would have to undo all of their gain."""
    roster = Roster(("a",), (True,), (10,))
    good, bad, own = Measure(0.5, 0.9, 10), Measure(0.8, 0.6, 10), Measure(0.7, 0.7, 10)
    for credit in (True, False):
        state = Fallback(apart=True)
        for _ in range(30):
            state = assess(roster, state, {0: good}, {0: own}, credit=credit)
            assert not state.behind
        assert assess(roster, state, {0: bad}, {0: own}, credit=credit).behind is not credit


def test_without_credit_a_higher_loss_is_behind_though_accuracy_is_not():
    roster = Roster(("a",), (True,), (10,))
    chosen, own = {0: Measure(0.8, 0.9, 10)}, {0: Measure(0.7, 0.9, 10)}
    assert not assess(roster, Fallback(apart=True), chosen, own).behind
    assert assess(roster, Fallback(apart=True), chosen, own, credit=False).behind
    regression, own = {0: Measure(0.8, None, 10)}, {0: Measure(0.7, None, 10)}
    assert assess(roster, Fallback(apart=True), regression, own, credit=False).behind


def test_without_credit_a_drop_of_accuracy_is_behind_at_once_though_the_loss_is_lower():
    """Attackers may lower the loss and the accuracy together: models that are less sure, and more often wrong."""
    roster = Roster(("a",), (True,), (10,))
    own = {0: Measure(0.7, 0.8, 10)}
    slight, large = {0: Measure(0.6, 0.795, 10)}, {0: Measure(0.6, 0.77, 10)}
    assert not assess(roster, Fallback(apart=True), large, own).behind
    assert assess(roster, Fallback(apart=True), large, own, credit=False).behind
    assert not assess(roster, Fallback(apart=True), slight, own, credit=False).behind


def test_without_credit_what_nobody_compared_is_not_served():
    roster = Roster(("a",), (True,), (10,))
    before = Fallback(apart=True, loss=0.5, accuracy=0.9, deficit=0.001)
    assert not assess(roster, before, {}, {}).behind
    assert assess(roster, before, {}, {}, credit=False) == Fallback(apart=True, deficit=0.001, behind=True)


@pytest.mark.parametrize("free", [2, 8])
def test_while_no_evaluator_answers_nobody_is_admitted_or_trained_on(free):
    clients = Line([1.0, 1.0, *[-2.0] * free], silent={1, 2})
    played = play(Verified(), clients, rounds=4)
    assert played.model == 4.0
    for record in played.history.rounds[1:3]:
        assert {client.decision for client in record.clients[2:]} == {"refused"}
        assert {client.reason for client in record.clients[2:]} == {"not measured in this round"}
    assert "reputation" in played.rounds[-1].snapshot.values
    assert max(played.rounds[1].snapshot.values["reputation"].values()) < 1.0  # silence says nothing about clients


def test_while_no_evaluator_answers_the_priority_clients_own_model_is_served():
    clients = Line([1.0, 1.0, *[2.0] * 6], silent={3})
    played = play(Verified(), clients, rounds=5)
    served = [done.model for done in played.rounds]
    assert served[3] == 4.0
    assert played.history[3].fallback.behind
    assert served[2] > 3.0  # and again, from the training model, when they answer
    assert served[4] > 5.0
    assert played.history[3].promise.worse_by == 0.0


def test_a_loss_that_is_not_finite_is_the_worst():
    class Breaks(Line):
        def measure(self, model, client, split):
            found = super().measure(model, client, split)
            return replace(found, loss=math.nan) if model > self.round + 1 else found

    played = play(Verified(), Breaks([1.0, 1.0, *[2.0] * 5]), rounds=3)
    assert played.model == 3.0
    assert all(tried.loss is None for tried in played.history[0].tried if tried.admitted)
    json.dumps(played.rounds[-1].snapshot.values, allow_nan=False)


def test_a_training_model_far_behind_starts_again_and_the_record_says_so():
    """Priority clients that differ as much tolerate hostile ones in the training model, which then falls behind."""
    played = play(Verified(cosine=-1.0), Line([-1.0, 3.0, *[-2.0] * 5]), rounds=6)
    assert [done.model for done in played.rounds] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    first, second, third = played.history.rounds[:3]
    assert decisions(played, 0)[2:] == ["base"] * 5
    assert first.inclusion < 0.5
    assert second.fallback.behind  # the round begins again from the priority-only model
    assert second.inclusion == 1.0
    assert decisions(played, 1)[2:] == ["refused"] * 5
    assert third.global_loss == BEST - 2.0


def test_training_on_free_clients_that_do_not_pay_starts_again_with_fewer_of_them():
    """Free clients that only repeat what the priority clients do are harmless, and no reason to take a risk."""
    played = play(Verified(), Line([1.0, 1.0, 1.0, 1.0, 1.0]), rounds=9)
    assert [record.inclusion for record in played.history.rounds] == [0.4] * 7 + [1.0, 0.5]
    assert decisions(played, 6)[2:] == ["base"] * 3
    assert decisions(played, 7)[2:] == ["refused"] * 3
    assert decisions(played, 8)[2:] == ["base", "base", "refused"]


def test_training_on_free_clients_that_pay_goes_on():
    played = play(Verified(), Line([1.0, 1.0, 2.0, 2.0, 2.0]), rounds=20)
    assert decisions(played)[2:] == ["admitted"] * 3
    assert played.rounds[-1].snapshot.values["breadth"] == 1.0
    assert played.rounds[-1].snapshot.values["head_start"] > 0.05


def test_head_starts_that_are_not_finite_are_the_worst_or_unknown():
    assert averaged(0.02, math.inf, 1.0) == 0.02
    assert averaged(0.02, 1.0, math.inf) == pytest.approx(0.9 * 0.02 - 0.1)
    assert averaged(0.0, 2.0, 1.0) == pytest.approx(0.05)
    assert averaged(0.0, 0.0, 0.0) == 0.0


def test_a_fallback_of_an_earlier_round_is_not_told_again():
    """After a start from the priority-only model with nobody admitted, there is nothing to compare."""
    moves = [-1.0, 3.0, *[lambda t: -2.0 if t == 0 else 0.0] * 5]
    played = play(Verified(cosine=-1.0), Line(moves), rounds=4)
    assert played.history[1].fallback.behind
    assert not played.history[3].fallback.behind
    assert not played.history[3].fallback.apart


@pytest.mark.parametrize("probes", [1, 3, 4, 64])
def test_clients_take_turns_if_there_are_more_than_probes(probes):
    rounds = 8
    played = play(Verified(probes=probes), Line([1.0, 1.0, *[2.0] * 8]), rounds=rounds)
    most = min(probes, 8)
    first = asked(played, Aggregate)[0]
    assert len(first.mixes) == 1 + 2 + most  # the priority clients, without each of them, with each probed client
    assert first.again
    probed = [
        {k for mix in request.mixes for k in mix.shares if k >= 2}
        for request in asked(played, Aggregate)
        if request.again
    ]
    assert set().union(*probed[: math.ceil(8 / most)]) == set(range(2, 10))
    # Only those that were measured are in the models of the round.
    for record, members in zip(played.history.rounds, probed, strict=True):
        assert {k for k, c in enumerate(record.clients) if not c.priority and c.weight} <= members
        others = [c for k, c in enumerate(record.clients) if not c.priority and k not in members]
        assert {c.reason for c in others} <= {"not measured in this round"}


def test_turns_do_not_follow_the_order_of_a_rules_selection():
    class Backwards(fa.Everyone):
        def select(self, offers, broadcast):
            return fa.Selection(tuple(sorted(offers, reverse=broadcast.round % 2 == 1)))

    played = play(Verified(Backwards(), probes=2), Line([1.0, 1.0, *[2.0] * 4]), rounds=2)
    probed = [
        {k for mix in request.mixes for k in mix.shares if k >= 2}
        for request in asked(played, Aggregate)
        if request.again
    ]
    assert probed == [{2, 3}, {4, 5}]


def test_probes_have_the_same_weight_whatever_sample_counts_are_claimed():
    played = play(Verified(), Line([1.0, 1.0, 2.0, 2.0], samples=(10, 10, 1, 1000)))
    first = asked(played, Aggregate)[0]
    assert [mix.shares[k] for mix, k in zip(first.mixes[3:], (2, 3), strict=True)] == [pytest.approx(1 / 3)] * 2


@pytest.mark.parametrize(
    "inner", [fa.TrustWeighted(), fa.LossWeighted(), fa.GradientAlign(), fa.Align(300.0), fa.AutoAlign(ladder=(0, 500))]
)
def test_it_verifies_rules_with_weights_scales_and_steps(inner):
    played = play(Verified(inner), Line([1.0, 1.0, 2.0, 2.0, -2.0]), rounds=3)
    if not isinstance(inner, fa.TrustWeighted):  # which makes all updates as long as the priority clients' mean
        assert played.model > 3.0
        assert decisions(played)[2:] == ["admitted", "admitted", "refused"]
    assert decisions(played)[4] == "refused"
    for record in played.history.rounds:
        assert math.fsum(client.weight for client in record.clients) == pytest.approx(1.0)


def test_what_the_inner_rule_says_about_those_that_it_does_not_propose_is_told():
    played = play(Verified(fa.GradientAlign()), Line([1.0, 1.0, 2.0, -2.0]))
    assert played.history[0].clients[3].reason == "cosine -1, below 0"


def test_warm_up_is_for_priority_clients_alone():
    plan = Plan(Verified(), 4, warmup=2)
    played = play(plan, Line([1.0, 1.0, 2.0, 2.0]))
    assert [done.model for done in played.rounds[:2]] == [1.0, 2.0]
    assert decisions(played, 0)[2:] == ["absent", "absent"]
    assert decisions(played, 2)[2:] == ["admitted", "admitted"]


def test_a_priority_client_that_is_lost_counts_nowhere():
    played = play(Verified(), Line([1.0, 5.0, 1.0, 2.0], priority=3, lost={1}), rounds=3)
    assert decisions(played) == ["trained", "lost", "trained", "admitted"]
    for request in asked(played, Aggregate):
        assert all(1 not in mix.shares and 1 not in mix.anchor for mix in request.mixes)


def test_without_any_priority_client_the_round_is_skipped():
    played = play(Verified(), Line([1.0, 1.0, 2.0], lost={0, 1}), model=7.0, rounds=2)
    assert played.model == 7.0
    assert played.history[1].skipped == "no priority client answered"


@pytest.mark.parametrize(
    "participation",
    [fa.Uniform(0.5), fa.Replacement(2), fa.Bernoulli(0.6), None],
    ids=["uniform", "replacement", "bernoulli", "trace"],
)
def test_participation(participation, tmp_path):
    if participation is None:
        rows = [(0, k) for k in (0, 1, 4, 5, 7, 8)] + [(1, k) for k in (2, 3, 6, 9)]
        (tmp_path / "trace.csv").write_text("round,client\n" + "".join(f"{t},{k}\n" for t, k in rows))
        participation = fa.Trace(tmp_path / "trace.csv", repeat=True)
    moves = [1.0, 1.0, 1.0, 1.0, *[2.0] * 3, *[-2.0] * 3]
    clients = Line(moves, priority=4, participation=participation)
    played = play(Verified(), clients, rounds=12)
    alone = play(fa.PriorityOnly(), Line(moves, priority=4, participation=participation), rounds=12)
    assert played.model >= alone.model
    for record in played.history.rounds:
        for client in record.clients[7:]:
            assert client.decision in ("refused", "absent")


@pytest.mark.parametrize("server", [None, fa.FedAdam(lr=0.5), fa.FedAvgM(momentum=0.9)])
@pytest.mark.parametrize("probes", [2, 64])
def test_a_resume_goes_on_alike(server, probes):
    def sometimes(round):
        return 2.0 if round % 3 else -2.0

    moves = [1.0, 1.2, sometimes, sometimes, 2.0, -2.0, 1.5]
    plan = Plan(Verified(probes=probes), 8, server=server)
    whole = play(plan, Line(moves, accuracy=lambda m: min(1.0, m / 100)))
    for stop in range(1, 8):
        saved = whole.rounds[stop - 1].snapshot
        saved = Snapshot(saved.round, saved.tensors, json.loads(json.dumps(saved.values)))
        later = play(plan, Line(moves, accuracy=lambda m: min(1.0, m / 100)), snapshot=saved)
        assert later.history.rounds == whole.history.rounds[stop:]
        assert later.model == whole.model


def test_a_priority_only_model_that_was_not_trained_stays():
    class Quits(Line):
        def reply(self, request, client):
            alone = all(self.roster.priority[k] for k in request.clients)
            return Lost("gone") if alone else super().reply(request, client)

    played = play(Verified(), Quits([1.0, 1.0, 2.0]), rounds=4)
    assert played.history[-1].fallback.loss == 99.0
    assert len(asked(played, Invite)) == 7


def test_divergence_by_free_clients_restarts_from_the_priority_only_model():
    class Overflows(Line):
        def answer(self, request):
            reply = super().answer(request)
            if isinstance(request, Compare) and abs(self.received - round(self.received)) > 1e-9:
                return Compared({}, dict.fromkeys(request.clients, "its trained weights are not finite"))
            return reply

    played = play(Verified(), Overflows([1.0, 1.0, math.pi]), rounds=4)
    assert len(played.rounds) == 4
    assert played.model >= 4.0


def test_evaluators_that_did_not_measure_every_model_do_not_count():
    class Forgets(Line):
        calls = 0

        def measure(self, model, client, split):
            found = super().measure(model, client, split)
            if client == 1 and self.deciding:
                self.calls += 1
                return None if self.calls % 2 else replace(found, loss=0.0)
            return found

    played = play(Verified(), Forgets([1.0, 1.0, -2.0]))
    assert decisions(played)[2] == "refused"


def test_the_cost_is_counted():
    played = play(Verified(promise=False), Line([1.0, 1.0, 2.0, 2.0, 2.0]))
    record = played.history[0]
    # The broadcast; 3 free clients; the priority clients' aggregate, 2 without one of them, 3 with a free client, and
    # 4 sets, each measured by 2 clients.
    assert record.models_down == 2 + 3 + 2 * (1 + 2 + 3) + 2 * 4
    assert record.models_up == 5
    assert sum(len(clients) for e in asked(played, Evaluate) for _, clients in e.asked[:10]) >= 2 * 10


@pytest.mark.parametrize("priority", [1, 2, 3])
def test_the_aggregate_without_each_priority_client_is_measured_if_there_are_others(priority):
    clients = Line([1.0] * priority + [2.0] * 2, priority=priority)
    mixes = asked(play(Verified(), clients), Aggregate)[0].mixes
    members = [set(mix.shares) for mix in mixes]
    everybody = set(range(priority))
    without = [everybody - {k} for k in range(priority)] if priority > 1 else []
    assert members == [everybody, *without, everybody | {priority}, everybody | {priority + 1}]
    assert all(math.fsum(mix.shares.values()) == pytest.approx(1.0) for mix in mixes)


def test_harm_is_tolerated_in_training_up_to_that_of_a_missing_priority_client():
    """Without the second priority client the model is at −1, and at 0 with a client that moves by −2."""
    alike, unlike = (play(Verified(cosine=-1.0), Line([*moves, *[-2.0] * 5])) for moves in ([1.0, 1.0], [-1.0, 3.0]))
    assert decisions(alike)[2:] == ["refused"] * 5
    assert decisions(unlike)[2:] == ["base"] * 5
    assert unlike.model == 1.0  # and nobody is served it


def test_ties_prefer_fewer_clients_and_lower_numbers():
    assert order({5: 0.0, 3: 0.0, 4: -0.1}, {5: 0.0, 3: 0.0, 4: -0.1}) == [4, 3, 5]

    class Flat(Line):
        def measure(self, model, client, split):
            return Measure(1.0, None, 5)

    played = play(Verified(), Flat([1.0, 1.0, 2.0, 2.0]))
    assert [(tried.admitted, tried.chosen) for tried in played.history[0].tried] == [(0, True), (1, False), (2, False)]


def test_reputations_of_those_that_left_are_kept():
    assert reputations({2: 0.5, 3: -0.1}, {3: -0.1, 4: 0.2}) == {2: 0.5, 3: -0.1, 4: 0.2}


def test_outliers_are_not_trusted():
    changes = {k: -0.01 * k for k in range(6)} | {9: 0.5}
    good = dict.fromkeys(changes, -0.1)
    assert 9 not in Contributions(changes, math.inf).trusted(good)
    assert 9 not in Contributions(good, math.inf).trusted(changes)
    assert Contributions({}, 0.0).trusted({}) == set()


def test_nobody_is_trusted_who_harms_more_than_a_missing_priority_client():
    changes = {1: -0.1, 2: 0.1, 3: 0.3}
    assert Contributions(changes, 0.2).trusted(changes) == {1, 2}
    assert usual_limit(changes) == math.inf


def test_the_promise_is_recorded():
    clients = Line([1.0, 1.0, 2.0], outcomes={0: Outcomes(3, 1, 100), 1: Outcomes(0, 0, 100)})
    played = play(Verified(), clients, rounds=3)
    promise = played.history[-1].promise
    assert (promise.gained, promise.lost, promise.samples) == (3, 1, 200)
    assert 0 < promise.worse_by < promise.strict
    assert promise.log_lasting == pytest.approx(3 * math.log(2 + 1))  # one client, or a new start
    assert play(Verified(promise=False), Line([1.0, 1.0, 2.0])).history[0].promise is None


def test_samples_that_were_trained_on_promise_nothing():
    clients = Line([1.0, 1.0, 2.0], outcomes={0: Outcomes(3, 1, 100)})
    played = play(Plan(Verified(), 3, evaluate_on="train", match_on="train"), clients)
    assert all(record.promise is None for record in played.history.rounds)
