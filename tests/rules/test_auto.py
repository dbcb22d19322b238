"""AutoALIGN: the priority clients choose ε every round."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import blobs
from fedalign.protocol.federated import federated
from hypothesis import given
from hypothesis import strategies as st

import fedalign as fa
from fedalign.protocol.messages import Combine, Combined, Compare, Declined, Evaluate, RoundDone, Train, Update
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import RoundRecord
from fedalign.protocol.roster import Roster
from fedalign.rules.align import AutoAlign
from fedalign.rules.rule import Broadcast, Measure, Similarity
from fedalign.training.participation import Full, Participation, Presence

ROSTER = Roster(("a", "b", "c", "d", "e"), (True, True, False, False, False), (30, 10, 20, 20, 40))
LOSS = {0: 1.0, 1: 2.0, 2: 1.3, 3: 1.55, 4: 9.0}  # F = 1.25; gaps of c, d, e: 0.05, 0.3, 7.75
LADDER = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, math.inf)
COSINE = {0: 1.0, 1: 1.0, 2: -0.2, 3: 0.3, 4: 0.0}  # the base has d and e
VALUE = {0: 10.0, 1: 10.0, 2: 4.0, 3: 1.0, 4: -100.0}  # the trained "models"; the priority clients like 6.5


class Drawn(Participation):
    """Everybody trains, some judge."""

    def __init__(self, *judges):
        self.judges = judges

    def draw(self, round, roster, seed):
        return Presence((True,) * len(roster))

    def jury(self, round, roster, seed):
        return Presence(tuple(k in self.judges for k in range(len(roster))))


def play(rule, judge=lambda model: abs(model - 6.5), lost=(), not_finite=(), rounds=1, participation=None):
    """Drive a run whose models are numbers; give its records and requests."""
    run = federated(Plan(ROSTER, rule, rounds, 0, participation or Full(), work=(30, 10, 20, 20, 40)), 0.0)
    requests, reply = [], None
    while True:
        try:
            request = run.send(reply)
        except StopIteration as stop:
            return stop.value, requests
        requests.append(request)
        if isinstance(request, RoundDone):
            reply = None
        elif isinstance(request, Combine):
            models = tuple(sum(VALUE[k] * w for k, w in mix.items()) for mix in request.mixes)
            reply = Combined(models, not_finite)
        elif isinstance(request, Compare):
            assert request.reference == {0: 0.75, 1: 0.25}
            reply = {k: Similarity(COSINE[k], 1.0) for k in request.clients}
        elif isinstance(request, Evaluate) and len(requests) == 1:
            reply = [Measure(LOSS[k], 0.5, 5) for _, k in request.jobs]
        elif isinstance(request, Evaluate):
            reply = [None if k in lost else Measure(judge(model), 0.5, 5) for model, k in request.jobs]
        else:
            assert isinstance(request, Train)
            reply = []
            for _, k in request.jobs:
                own = Measure(LOSS[k], 0.5, 5)
                if ROSTER.priority[k]:
                    reply.append(Update())
                elif request.rule.offers(own, request.broadcast):
                    reply.append(Update(own=own))
                else:
                    reply.append(Declined(own))


def decisions(result):
    return [client.decision for client in result.history[0].clients]


def test_a_round_by_hand():
    result, requests = play(AutoAlign(LADDER))
    record = result.history[0]
    # Sets along the ladder: none; c (0.05, 0.1, 0.2); c, d (0.4 to 1.6); all (∞). Means: 10, 8, 6.25, -22.4...
    assert [(t.epsilon, t.admitted) for t in record.tried] == [(0.0, 0), (0.1, 1), (0.4, 2), (math.inf, 3)]
    assert record.epsilon == 0.4
    assert decisions(result) == ["trained", "trained", "admitted", "admitted", "refused"]
    assert result.model == pytest.approx((10 + 0.5 * 4 + 0.5 * 1) / 2)
    assert "within 0.4 of 1.25" in record.clients[4].reason
    # Costs by hand: 5 models down with the broadcast, 4 candidates to 2 judges; 5 up; everybody trained.
    assert (record.models_down, record.models_up, record.samples) == (5 + 8, 5, 120)
    kinds = [type(r).__name__ for r in requests]
    assert kinds == ["Evaluate", "Train", "Combine", "Evaluate", "Evaluate", "Evaluate", "RoundDone"]
    assert len(requests[3].jobs) == 8


def test_without_a_ladder_it_cuts_anywhere():
    result, _ = play(AutoAlign())
    record = result.history[0]
    assert [t.admitted for t in record.tried] == [0, 1, 2, 3]
    assert [t.epsilon for t in record.tried] == pytest.approx([0.0, 0.05, 0.3, 7.75])
    assert record.epsilon == pytest.approx(0.3)
    assert decisions(result) == ["trained", "trained", "admitted", "admitted", "base"]


def test_the_next_round_starts_from_the_base():
    result, requests = play(AutoAlign())
    record, done = result.history[0], requests[-1]
    served, base = (10 + 0.5 * 4 + 0.5 * 1) / 2, (10 + 0.5 * 1 + 1.0 * -100) / 2.5
    assert result.model == done.model == pytest.approx(served)
    assert done.memory == pytest.approx((base, 10.0))  # and FedAvg on the priority clients
    assert record.base
    assert (record.clients[4].weight, record.clients[4].decision) == (0.0, "base")
    assert record.clients[4].reason == "in the base: cosine 0, at least -0.1"
    assert record.inclusion == pytest.approx(1 / 2.5)
    # Candidates are measured; the base is not, it is nobody's choice.
    assert len(next(r for r in requests if isinstance(r, Combine)).mixes) == 5
    assert [len(r.jobs) for r in requests if isinstance(r, Evaluate)][1] == 4 * 2
    again, requests = play(AutoAlign(), rounds=2)
    trained = [r for r in requests if isinstance(r, Train)]
    assert [sorted({model for model, _ in r.jobs}) for r in trained] == [[0.0], [pytest.approx(base)], [10.0]]
    assert len(again.history) == 2


def test_a_base_that_is_a_candidate_is_averaged_once():
    _, requests = play(AutoAlign(cosine=-0.5))
    assert len(next(r for r in requests if isinstance(r, Combine)).mixes) == 4
    result, requests = play(AutoAlign(cosine=1.0))  # nobody: it is the priority clients' own
    assert len(next(r for r in requests if isinstance(r, Combine)).mixes) == 4
    assert requests[-1].memory == (10.0,)
    assert result.history[0].fallback is None  # which needs no second one beside


def test_without_a_cosine_the_next_round_starts_from_the_choice():
    result, requests = play(AutoAlign(cosine=None, fallback=False))
    assert (requests[-1].memory, result.history[0].base) == ((), False)
    assert not any(isinstance(r, Compare) for r in requests)
    for bad in (2, math.nan, "much"):
        with pytest.raises(fa.FedalignError, match="cosine must be from -1 to 1"):
            AutoAlign(cosine=bad)


def test_nobody_is_always_a_candidate():
    own = {2: Measure(1.0, 0.5, 1), 3: Measure(1.1, 0.6, 1)}
    told = Broadcast(0, 1.0, 0.5, math.inf)
    for rule in (AutoAlign((0, 0.1, 1)), AutoAlign((0.2, 1)), AutoAlign((0, 0.1, 1), on="accuracy"), AutoAlign()):
        assert rule.candidates(own, told)[0] == fa.Candidate(0.0, ())
        assert rule.candidates(own, told)[-1].clients == (2, 3)
    # But a single ε is FedALIGN's.
    assert [c.clients for c in AutoAlign((0,)).candidates(own, told)] == [(2,)]


def test_a_loss_that_is_no_number_spoils_no_cut():
    own = {k: Measure(math.nan if k == 4 else 1 + k / 10, None, 1) for k in range(2, 9)}
    found = AutoAlign().candidates(own, Broadcast(0, 1.0, None, math.inf))
    assert found[-1].clients == (2, 3, 5, 6, 7, 8)


def test_ties_go_to_the_smaller_set():
    result, _ = play(AutoAlign(), judge=lambda model: 1.0)
    assert result.history[0].epsilon == 0.0
    assert decisions(result)[2:] == ["refused", "base", "base"]


def test_a_ladder_of_one_value_is_fedalign():
    auto, requests = play(AutoAlign(ladder=(0.4,)))
    fixed, _ = play(fa.Align(0.4))
    assert auto.model == fixed.model
    assert auto.history[0] == fixed.history[0]
    assert sum(isinstance(r, Evaluate) for r in requests) == 3  # nobody is asked to choose


def test_nobody_offers():
    result, requests = play(AutoAlign(ladder=(0, 0.001)))
    assert result.history[0].tried == ()
    assert result.model == play(fa.PriorityOnly())[0].model
    assert [list(r.mixes[0]) for r in requests if isinstance(r, Combine)] == [[0, 1]]


def test_a_lost_judge_counts_for_no_candidate():
    result, _ = play(AutoAlign(LADDER), lost={1})
    assert result.history[0].epsilon == 0.4
    nobody, _ = play(AutoAlign(), lost={0, 1})
    assert nobody.history[0].epsilon == 0.0  # without a judge, priority clients only


def test_the_jury_measures_candidates():
    result, requests = play(AutoAlign(), participation=Drawn(1, 2), rounds=2)
    asked = [{k for _, k in r.jobs} for r in requests if isinstance(r, Evaluate)]
    assert asked[:2] == [{0, 1}, {1}]  # F(w), then the candidates: client 2 isn't a priority client
    # 5 models with the broadcast, 4 candidates to one judge. In the second round the priority clients train their own
    # model as well, and the judge gets it: it wouldn't otherwise.
    assert [r.models_down for r in result.history.rounds] == [5 + 4, 5 + 4 + 2 + 1]
    _, requests = play(AutoAlign(), participation=Drawn(4))
    assert {k for _, k in requests[4].jobs} == {0, 1}  # nobody was drawn: those that take part judge


def test_a_free_client_that_diverges_spoils_only_its_candidates():
    result, _ = play(AutoAlign(LADDER), not_finite=(3,))
    record = result.history[0]
    assert record.epsilon == 0.1
    assert record.clients[3].reason == "its trained weights are not finite"
    assert [t.loss is None for t in record.tried] == [False, False, True, True]
    spoiled, _requests = play(AutoAlign(), not_finite=(3,))  # the base, too: the next round starts from the choice
    assert not spoiled.history[0].base
    assert spoiled.history[0].clients[4].decision == "refused"
    with pytest.raises(fa.DivergedError, match=r"client\(s\) a"):
        play(AutoAlign(), not_finite=(0,))


def test_a_candidate_whose_loss_is_not_finite_is_not_chosen():
    result, _ = play(AutoAlign(), judge=lambda model: math.nan if model < 9 else 5.0)
    assert result.history[0].epsilon == 0.0


@given(st.dictionaries(st.integers(2, 9), st.floats(0, 5), max_size=8), st.floats(0, 5))
def test_candidates_are_nested_and_distinct(losses, centre):
    own = {k: Measure(loss, None, 1) for k, loss in losses.items()}
    found = AutoAlign().candidates(own, Broadcast(0, centre, None, math.inf))
    sets = [set(candidate.clients) for candidate in found]
    assert sets[0] <= {k for k in own if losses[k] == centre}
    assert sets[-1] == set(own)
    assert all(a < b for a, b in itertools.pairwise(sets))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "gave no candidate"),
        ([fa.Candidate(None, (1,))], "names client 1, which offered nothing"),
        ([fa.Candidate(None, (2,), weight={2: 1.0, 3: 1.0})], "gives a weight to client 3"),
    ],
)
def test_candidates_are_checked(given, message):
    class Odd(fa.Everyone):
        def candidates(self, own, broadcast):
            return given

    with pytest.raises(fa.FedalignError, match=f"Odd {message}"):
        play(Odd())


def test_ladders_are_checked():
    for bad in ((), (-0.1, 1), (math.nan,), 0.2, ("a",)):
        with pytest.raises(fa.FedalignError, match="ladder"):
            AutoAlign(ladder=bad)
    assert AutoAlign(ladder=(1, 0, 1)).ladder == (0.0, 1.0)
    with pytest.raises(fa.FedalignError, match="'loss' or 'accuracy'"):
        AutoAlign(on="taste")


def test_records_keep_what_was_tried():
    record = play(AutoAlign())[0].history[0]
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
