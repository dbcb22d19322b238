"""AutoALIGN: the priority clients choose ε every round."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import blobs
from hypothesis import given
from hypothesis import strategies as st

import fedalign as fa
from fedalign.protocol.messages import Aggregate, Compare, Evaluate, Invite
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import RoundRecord
from fedalign.protocol.roster import Roster
from fedalign.rules.auto import AutoAlign
from fedalign.rules.rule import Broadcast, Measure, Offer, Selection
from fedalign.testing import MadeUpClients, play
from fedalign.training.participation import Participation, Presence

ROSTER = Roster(("a", "b", "c", "d", "e"), (True, True, False, False, False), (30, 10, 20, 20, 40))
LOSS = {0: 1.0, 1: 2.0, 2: 1.3, 3: 1.55, 4: 9.0}  # F = 1.25; gaps of c, d, e: 0.05, 0.3, 7.75
LADDER = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, math.inf)
COSINE = {0: 1.0, 1: 1.0, 2: -0.2, 3: 0.3, 4: 0.0}  # the training model has d and e
VALUE = {0: 10.0, 1: 10.0, 2: 4.0, 3: 1.0, 4: -100.0}  # the trained "models"; the priority clients like 6.5


class Drawn(Participation):
    """Everybody trains, some evaluate."""

    def __init__(self, *evaluators):
        self.evaluators = evaluators

    def draw(self, round, roster, seed):
        return Presence((True,) * len(roster))

    def draw_evaluators(self, round, roster, seed):
        return Presence(tuple(k in self.evaluators for k in range(len(roster))))


class Voters(MadeUpClients):
    """Models are numbers. Losses of the initial model are given; ``loss`` is the priority clients' of all others.

    Evaluators in ``absent`` measure no candidate.
    """

    def __init__(self, loss, absent, **options):
        super().__init__(ROSTER, LOSS, VALUE, cosines=COSINE, **options)
        self.loss, self.absent = loss, absent

    def measure(self, model, client, split):
        if model == 0.0 or not ROSTER.priority[client]:
            return super().measure(model, client, split)
        return None if client in self.absent else Measure(self.loss(model), 0.5, 5)

    def answer(self, request):
        if isinstance(request, Compare):
            assert request.reference == {0: 0.75, 1: 0.25}
        return super().answer(request)


def vote(rule, loss=lambda model: abs(model - 6.5), absent=(), not_finite=(), rounds=1, participation=None):
    """Run a rule with such clients."""
    refused = dict.fromkeys(not_finite, "its trained weights are not finite")
    voters = Voters(loss, absent, refused=refused, participation=participation)
    return play(Plan(rule, rounds, work=(30, 10, 20, 20, 40)), voters)


def asked(played):
    """Give, for every request to evaluate, the models and the clients that were asked for each."""
    return [request.asked for request in played.requests if isinstance(request, Evaluate)]


def mixes(played):
    """Give the mixes of the first aggregate."""
    return next(request.mixes for request in played.requests if isinstance(request, Aggregate))


def decisions(result):
    return [client.decision for client in result.history[0].clients]


def test_a_round_by_hand():
    result = vote(AutoAlign(LADDER))
    record = result.history[0]
    # Sets along the ladder: none; c (0.05, 0.1, 0.2); c, d (0.4 to 1.6); all (∞). Means: 10, 8, 6.25, -22.4...
    assert [(t.epsilon, t.admitted) for t in record.tried] == [(0.0, 0), (0.1, 1), (0.4, 2), (math.inf, 3)]
    assert record.epsilon == 0.4
    assert decisions(result) == ["trained", "trained", "admitted", "admitted", "refused"]
    assert result.model == pytest.approx((10 + 0.5 * 4 + 0.5 * 1) / 2)
    assert "within 0.4 of 1.25" in record.clients[4].reason
    # Costs by hand: 5 models down with the broadcast, 4 candidates to 2 evaluators; 5 up; everybody trained.
    assert (record.models_down, record.models_up, record.samples) == (5 + 8, 5, 120)
    kinds = [type(r).__name__ for r in result.requests]
    assert kinds[:5] == ["WhoIsThere", "Evaluate", "Invite", "WhoIsThere", "Aggregate"]
    assert kinds[5:] == ["Evaluate", "Evaluate", "Evaluate", "RoundDone"]
    assert [clients for _, clients in asked(result)[1]] == [(0, 1)] * 4


def test_without_a_ladder_it_cuts_anywhere():
    result = vote(AutoAlign())
    record = result.history[0]
    assert [t.admitted for t in record.tried] == [0, 1, 2, 3]
    assert [t.epsilon for t in record.tried] == pytest.approx([0.0, 0.05, 0.3, 7.75])
    assert record.epsilon == pytest.approx(0.3)
    assert decisions(result) == ["trained", "trained", "admitted", "admitted", "base"]


def test_the_next_round_starts_from_the_training_model():
    result = vote(AutoAlign())
    record, done = result.history[0], result.rounds[-1]
    served, training = (10 + 0.5 * 4 + 0.5 * 1) / 2, (10 + 0.5 * 1 + 1.0 * -100) / 2.5
    assert result.model == done.model == pytest.approx(served)
    expected = {
        "model": served,
        "training": training,
        "priority_only": 10.0,
    }  # the last is FedAvg on the priority clients
    assert done.snapshot.tensors == pytest.approx(expected)
    assert record.base
    assert (record.clients[4].weight, record.clients[4].decision) == (0.0, "base")
    assert record.clients[4].reason == "in the base: cosine 0, at least -0.1"
    assert record.inclusion == pytest.approx(1 / 2.5)
    # Candidates are measured; the training model is not, it is nobody's choice.
    assert len(mixes(result)) == 5
    assert [clients for _, clients in asked(result)[1]] == [(0, 1)] * 4
    again = vote(AutoAlign(), rounds=2)
    trained = [r.model for r in again.requests if isinstance(r, Invite)]
    assert trained == [0.0, pytest.approx(training), 10.0]
    assert len(again.history) == 2


def test_a_training_model_that_is_a_candidate_is_aggregated_once():
    assert len(mixes(vote(AutoAlign(cosine=-0.5)))) == 4
    result = vote(AutoAlign(cosine=1.0))  # nobody: it is the priority clients' own
    assert len(mixes(result)) == 4
    tensors = result.rounds[-1].snapshot.tensors
    assert set(tensors) == {"model", "training"}
    assert tensors["training"] == 10.0
    assert result.history[0].fallback is None  # which needs no second one beside


def test_without_a_cosine_the_next_round_starts_from_the_choice():
    result = vote(AutoAlign(cosine=None, fallback=False))
    assert result.rounds[-1].snapshot.tensors == {"model": result.model}
    assert not result.history[0].base
    assert not any(isinstance(r, Compare) for r in result.requests)
    for bad in (2, math.nan, "much"):
        with pytest.raises(fa.FedalignError, match="cosine must be from -1 to 1"):
            AutoAlign(cosine=bad)


def test_nobody_is_always_a_candidate():
    offers = {2: Offer(Measure(1.0, 0.5, 1)), 3: Offer(Measure(1.1, 0.6, 1))}
    told = Broadcast(0, 1.0, 0.5, math.inf)
    for rule in (AutoAlign((0, 0.1, 1)), AutoAlign((0.2, 1)), AutoAlign((0, 0.1, 1), on="accuracy"), AutoAlign()):
        assert rule.candidates(offers, told)[0] == Selection((), epsilon=0.0)
        assert rule.candidates(offers, told)[-1].clients == (2, 3)
    # But a single ε is FedALIGN's.
    assert [c.clients for c in AutoAlign((0,)).candidates(offers, told)] == [(2,)]


def test_a_loss_that_is_no_number_spoils_no_cut():
    offers = {k: Offer(Measure(math.nan if k == 4 else 1 + k / 10, None, 1)) for k in range(2, 9)}
    found = AutoAlign().candidates(offers, Broadcast(0, 1.0, None, math.inf))
    assert found[-1].clients == (2, 3, 5, 6, 7, 8)


def test_ties_go_to_the_smaller_set():
    result = vote(AutoAlign(), loss=lambda model: 1.0)
    assert result.history[0].epsilon == 0.0
    assert decisions(result)[2:] == ["refused", "base", "base"]


def test_a_ladder_of_one_value_is_fedalign():
    auto = vote(AutoAlign(ladder=(0.4,)))
    fixed = vote(fa.Align(0.4))
    assert auto.model == fixed.model
    assert auto.history[0] == fixed.history[0]
    assert len(asked(auto)) == 3  # nobody is asked to choose


def test_nobody_offers():
    result = vote(AutoAlign(ladder=(0, 0.001)))
    assert result.history[0].tried == ()
    assert result.model == vote(fa.PriorityOnly()).model
    assert [list(mix.shares) for mix in mixes(result)] == [[0, 1]]


def test_a_lost_evaluator_counts_for_no_candidate():
    result = vote(AutoAlign(LADDER), absent={1})
    assert result.history[0].epsilon == 0.4
    nobody = vote(AutoAlign(), absent={0, 1})
    assert nobody.history[0].epsilon == 0.0  # without an evaluator, priority clients only


def test_the_evaluators_measure_candidates():
    result = vote(AutoAlign(), participation=Drawn(1, 2), rounds=2)
    # F(w), then the candidates: client 2 isn't a priority client
    assert [{k for _, clients in one for k in clients} for one in asked(result)[:2]] == [{0, 1}, {1}]
    # 5 models with the broadcast, 4 candidates to one evaluator. In the second round the priority clients train the
    # priority-only model as well, and the evaluator gets it: it wouldn't otherwise.
    assert [r.models_down for r in result.history.rounds] == [5 + 4, 5 + 4 + 2 + 1]
    result = vote(AutoAlign(), participation=Drawn(4))
    assert asked(result)[1][0][1] == (0, 1)  # nobody was drawn: those that take part evaluate


def test_a_free_client_that_diverges_is_in_no_candidate():
    result = vote(AutoAlign(LADDER), not_finite=(3,))
    record = result.history[0]
    assert record.epsilon == 0.1
    assert (record.clients[3].decision, record.clients[3].reason) == ("refused", "its trained weights are not finite")
    # The sets are made again of the others: none; c; c and e.
    assert [(t.epsilon, t.admitted) for t in record.tried] == [(0.0, 0), (0.1, 1), (math.inf, 2)]
    assert all(t.loss is not None for t in record.tried)
    assert result.model == pytest.approx((10 + 0.5 * 4) / 1.5)
    result = vote(AutoAlign(), not_finite=(3,))  # the training model goes without it, too
    assert [t.admitted for t in result.history[0].tried] == [0, 1, 2]
    assert decisions(result)[2:] == ["admitted", "refused", "base"]
    assert result.history[0].clients[3].reason == "its trained weights are not finite"
    assert result.rounds[-1].snapshot.tensors["training"] == pytest.approx((10 + 1.0 * -100) / 2)
    for rule in (AutoAlign(), AutoAlign(LADDER)):
        with pytest.raises(fa.DivergedError, match=r"client\(s\) a"):
            vote(rule, not_finite=(0, 3))


def test_a_candidate_whose_loss_is_not_finite_is_not_chosen():
    result = vote(AutoAlign(), loss=lambda model: math.nan if model < 9 else 5.0)
    assert result.history[0].epsilon == 0.0


@given(st.dictionaries(st.integers(2, 9), st.floats(0, 5), max_size=8), st.floats(0, 5))
def test_candidates_are_nested_and_distinct(losses, centre):
    offers = {k: Offer(Measure(loss, None, 1)) for k, loss in losses.items()}
    found = AutoAlign().candidates(offers, Broadcast(0, centre, None, math.inf))
    sets = [set(candidate.clients) for candidate in found]
    assert sets[0] <= {k for k in offers if losses[k] == centre}
    assert sets[-1] == set(offers)
    assert all(a < b for a, b in itertools.pairwise(sets))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "gave no candidate"),
        ([Selection((1,))], "names client 1, which offered nothing"),
        ([Selection(()), Selection((2,), weight={2: 1.0, 3: 1.0})], "gives a weight to client 3"),
        ([(2, 3)], r"must return a fedalign.Selection, not \(2, 3\)"),
    ],
)
def test_candidates_are_checked(given, message):
    class Odd(AutoAlign):
        def candidates(self, offers, broadcast):
            return given

    with pytest.raises(fa.FedalignError, match=f"Odd.*{message}"):
        vote(Odd())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Selection((1,)), "Odd names client 1, which offered nothing"),
        (Selection((2,), weight={2: 1.0, 3: 1.0}), "Odd gives a weight to client 3"),
        (None, "Odd.select must return a fedalign.Selection, not None"),
    ],
)
def test_selections_are_checked(given, message):
    class Odd(fa.Everyone):
        def select(self, offers, broadcast):
            return given

    with pytest.raises(fa.FedalignError, match=message):
        vote(Odd())


def test_a_training_set_is_checked():
    class Odd(AutoAlign):
        def training_set(self, offers, broadcast):
            return {0: "a priority client"}

    with pytest.raises(fa.FedalignError, match="Odd names client 0, which offered nothing"):
        vote(Odd())


def test_ladders_are_checked():
    for bad in ((), (-0.1, 1), (math.nan,), 0.2, ("a",)):
        with pytest.raises(fa.FedalignError, match="ladder"):
            AutoAlign(ladder=bad)
    assert AutoAlign(ladder=(1, 0, 1)).ladder == (0.0, 1.0)
    with pytest.raises(fa.FedalignError, match="'loss' or 'accuracy'"):
        AutoAlign(on="taste")


def test_records_keep_what_was_tried():
    record = vote(AutoAlign()).history[0]
    assert RoundRecord.from_json(record.to_json()) == record
    old = record.to_json().replace('"samples":120,', "")
    assert RoundRecord.from_json(old[: old.index(',"tried"')] + "}").tried == ()
    # A first version went back and let free clients rest.
    old = record.to_json().replace('"behind":false', '"rest":3,"setbacks":1')
    assert RoundRecord.from_json(old) == record


def federation():
    clients = [blobs(40, seed) for seed in range(3)]
    x, y = blobs(60, 9)
    clients += [(x, y), (x, (y + 1) % 4), (x, np.zeros_like(y))]
    return fa.Federation.from_arrays(clients, priority=[True, True, False, False, False, False])


@pytest.mark.parametrize("server", [None, fa.FedAdam(lr=0.1)])
def test_never_worse_than_priority_only_on_held_out_data(server):
    local, make = fa.LocalSGD(lr=0.05, epochs=2, batch_size=10), lambda: torch.nn.Linear(6, 4)
    result = fa.simulate(federation(), make, AutoAlign(), 25, 0.2, local, device="cpu", server=server)
    chosen = set()
    for record in result.history.rounds:
        if record.warmup:
            assert record.tried == ()
            continue
        (nobody,) = [t.loss for t in record.tried if t.admitted == 0]
        (best,) = [t for t in record.tried if t.chosen]
        assert best.loss <= nobody
        assert best.loss == min(t.loss for t in record.tried)
        assert best.epsilon == record.epsilon
        chosen.add(record.epsilon)
    assert len(chosen) > 1


def test_equal_sets_are_trained_and_measured_once(monkeypatch):
    from fedalign.simulation.engine.batched import BatchedEngine

    trained = []
    original = BatchedEngine.train

    def train(self, jobs):
        trained.append([job.client for job in jobs])
        return original(self, jobs)

    monkeypatch.setattr(BatchedEngine, "train", train)
    fa.simulate(federation(), lambda: torch.nn.Linear(6, 4), AutoAlign(ladder=(0, 0.5)), 4, 0, device="cpu")
    for clients in trained:
        assert len(set(clients)) == len(clients)
        assert {0, 1} <= set(clients) or not clients


def test_auto_equals_priority_bit_for_bit_when_nobody_offers():
    make = lambda: torch.nn.Linear(6, 4)  # noqa: E731
    fed = federation()
    for server in (None, fa.FedAdam()):
        alone = fa.simulate(fed, make, fa.PriorityOnly(), 6, 0, device="cpu", server=server)
        nobody = {"participation": fa.Bernoulli(0.0)}
        for rule, more in ((AutoAlign(ladder=(0.0,)), {}), (AutoAlign(), nobody), (AutoAlign((0, 1)), nobody)):
            auto = fa.simulate(fed, make, rule, 6, 0, device="cpu", server=server, **more)
            assert torch.equal(auto.model.weight, alone.model.weight)
            assert not any(r.tried or r.base for r in auto.history.rounds)


@pytest.mark.parametrize("calibrated", [False, True])
def test_calibrated_losses_are_asked_for_where_the_rule_compares_them(monkeypatch, calibrated):
    asked = []

    def recorded(*given, **options):
        asked.append(options["tempered"])
        return Evaluate(*given, **options)

    monkeypatch.setattr("fedalign.protocol.candidates.Evaluate", recorded)
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(40, 4, generator=draw), torch.arange(40) % 3) for _ in range(4)]
    federation = fa.Federation.from_arrays(clients, priority=[True, True, False, False], heldout_fraction=0.25)
    for engine in ("batched", "reference"):
        rule = fa.AutoAlign(calibrated=calibrated)
        fa.simulate(federation, lambda: torch.nn.Linear(4, 3), rule, 3, 0, device="cpu", engine=engine)
    assert asked
    assert set(asked) == {calibrated}
