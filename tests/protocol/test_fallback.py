"""The fallback: from choices that are good for a round and bad for the run to the priority-only model."""

import json
import math
from dataclasses import replace

import pytest
import torch
from conftest import assert_resumes_alike, blobs

import fedalign as fa
from fedalign.experiments.store import RunStore
from fedalign.protocol.fallback import MARGIN, SMOOTHING, assess
from fedalign.protocol.messages import Evaluate, Invite, Lost, RoundDone, WhoIsThere
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import Fallback, RoundRecord
from fedalign.protocol.roster import Roster
from fedalign.rules.auto import AutoAlign
from fedalign.rules.rule import Measure, Similarity
from fedalign.testing import MadeUpClients, play

ROSTER = Roster(("a", "b", "c"), (True, True, False), (30, 10, 20))
WORK = (30, 10, 20)


def whole(model):
    """Tell the priority-only models: they have only ever moved by 1."""
    return abs(model - round(model)) < 1e-9


class Climbers(MadeUpClients):
    """Models are numbers: priority clients add 1, the free one π, and a larger number has less loss.

    So the free client is admitted whenever it may. ``accuracy`` says how models do otherwise. In round ``silent`` the
    evaluators are lost; from round ``leaves`` on, the free client's update points away; from models that ``overflows``
    names, training does not stay finite; clients in ``absent`` do not train the priority-only model.
    """

    def __init__(
        self, accuracy, loss=lambda m: 100 - m, silent=None, leaves=math.inf, overflows=lambda m: False, absent=()
    ):
        super().__init__(ROSTER)
        self.accuracy, self.loss, self.silent, self.leaves = accuracy, loss, silent, leaves
        self.overflows, self.absent, self.round = overflows, absent, 0

    def measure(self, model, client, split):
        if not ROSTER.priority[client]:
            return Measure(100.0, 0.9, 5)
        if self.round == self.silent and self.received is not None and split == "heldout":
            return None
        return Measure(self.loss(model), self.accuracy(model), 5)

    def train(self, model, client):
        return model + (1.0 if ROSTER.priority[client] else math.pi)

    def reply(self, request, client):
        alone = len(request.clients) == 2  # the priority-only model
        return Lost("gone") if alone and client in self.absent else super().reply(request, client)

    def similarity(self, client):
        return Similarity(1.0 if self.round < self.leaves else -1.0, 1.0)

    def refusals(self, clients):
        return dict.fromkeys(clients, "its trained weights are not finite") if self.overflows(self.received) else {}

    def answer(self, request):
        if isinstance(request, WhoIsThere):
            self.round = request.round
        return super().answer(request)


def climb(rounds, accuracy, rule=None, server=None, snapshot=None, match_on="heldout", **options):
    """Run AutoALIGN with such clients."""
    plan = Plan(rule or AutoAlign(), rounds, work=WORK, server=server, match_on=match_on)
    return play(plan, Climbers(accuracy, **options), snapshot=snapshot)


def behind(by):
    return lambda model: 0.9 if whole(model) else 0.9 - by


def test_a_lasting_deficit_serves_the_priority_clients_their_own_model():
    result = climb(12, behind(0.02), AutoAlign(credit=True))
    rounds, done = result.history.rounds, result.rounds
    # Smoothed, 0.02 behind is 0.002, 0.0038, 0.00542: the third round is more than half a point.
    assert [r.fallback.behind for r in rounds[:4]] == [False, False, True, True]
    assert rounds[1].fallback.deficit == pytest.approx(0.0038)
    assert rounds[1].clients[2].decision == "admitted"
    assert rounds[2].clients[0].weight == 0.75
    assert rounds[2].epsilon > 0  # what was chosen is still told
    assert [t.admitted for t in rounds[2].tried if t.chosen] == [1]
    # It is FedAvg's on the priority clients. The training model goes on with the free client's updates.
    assert [d.model for d in done[2:]] == [float(r) for r in range(3, 13)]
    assert not whole(done[1].model)
    assert all(r.base and r.clients[2].decision == "base" for r in rounds[2:])
    assert all(not whole(d.snapshot.tensors["training"]) for d in done[2:])
    plain = climb(3, behind(0.02), AutoAlign(cosine=None, credit=True))
    assert "set aside" in plain.history[2].clients[2].reason


def test_without_credit_a_single_round_behind_is_not_served():
    def strikes(model):
        return 0.9 if whole(model) else (0.95 if model < 20 else 0.7)

    kept, at_once = (climb(12, strikes, AutoAlign(credit=credit)) for credit in (True, False))
    first = next(t for t, done in enumerate(kept.rounds) if done.model > 20)
    assert first > 3
    assert not any(r.fallback.behind for r in kept.history.rounds[: first + 1])
    assert [r.fallback.behind for r in at_once.history.rounds[: first + 1]] == [False] * first + [True]
    assert at_once.rounds[first].model == first + 1.0
    assert at_once.history[first].fallback.deficit > 0  # good rounds have not made it negative
    assert AutoAlign() == AutoAlign(credit=False)


def test_without_credit_a_higher_loss_is_not_served_though_accuracy_is_not_lower():
    def loss(model):
        return 100 - model if whole(model) or model < 8 else 100.0

    kept, at_once = (
        climb(8, lambda model: 0.9, AutoAlign((0, 50.0), credit=credit), loss=loss) for credit in (True, False)
    )
    assert not any(r.fallback.behind for r in kept.history.rounds)
    assert any(r.fallback.behind for r in at_once.history.rounds)


@pytest.mark.parametrize("credit", [True, False])
def test_the_choice_is_served_again_when_it_has_caught_up(credit):
    accuracy = lambda model: 0.9 if whole(model) else (0.88 if model < 20 else 0.95)  # noqa: E731
    result = climb(60, accuracy, AutoAlign(credit=credit))
    told = [r.fallback.behind for r in result.history.rounds]
    assert told[2]
    assert not told[-1]
    assert result.history.rounds[-1].clients[2].decision == "admitted"
    assert not whole(result.rounds[-1].model)


def test_a_training_model_whose_loss_is_not_finite_starts_again_from_the_fallback():
    def loss(model):
        return 100 - model if whole(model) or model < 8 else math.inf

    for leaves in (math.inf, 4):  # the free client isn't in the training model from this round on
        result = climb(8, lambda model: 0.9, loss=loss, leaves=leaves)
        done = result.rounds
        assert all(math.isfinite(r.global_loss) for r in result.history.rounds)
        assert whole(done[-1].model) or done[-1].model < 8
        assert any(r.fallback is None or not r.fallback.apart for r in result.history.rounds[3:]) == (leaves == 4)
        for stop in range(1, 8):
            later = climb(8, lambda model: 0.9, loss=loss, leaves=leaves, snapshot=done[stop - 1].snapshot)
            assert later.history.rounds == result.history.rounds[stop:]
    # Only where there is a fallback.
    with pytest.raises(fa.DivergedError):
        climb(8, lambda model: 0.9, AutoAlign(fallback=False, cosine=-1), loss=lambda m: math.inf if m > 4 else 100 - m)


def test_a_training_model_that_overflows_starts_again_from_the_fallback():
    def overflows(model):
        return model > 6 and not whole(model)

    result = climb(8, lambda model: 0.9, overflows=overflows)
    assert len(result.rounds) == 8
    again = [r for r in result.history.rounds if r.models_up == 6]  # the round is begun again: everybody trains twice
    assert again
    assert all(r.models_down == 3 + 3 + 4 for r in again)  # the broadcast, twice, and the candidates of the second
    with pytest.raises(fa.DivergedError):
        climb(8, lambda model: 0.9, AutoAlign(fallback=False, cosine=-1), overflows=overflows)


def test_a_wild_free_client_ends_no_run():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 40, 5, generator=draw)
    y = (x @ torch.randn(5, 1, generator=draw)).tanh()
    clients = [(x[0], y[0]), (x[1], y[1]), (x[2][:6], 50 * y[2][:6]), (x[3][:6], 50 * y[3][:6])]
    fed = fa.Federation.from_arrays(clients, priority=[True, True, False, False])

    def make():
        layers = [torch.nn.Linear(5, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))

    local = fa.LocalSGD(lr=0.05, epochs=2, batch_size=10)
    more = {"loss": fa.squared_error, "device": "cpu"}
    with pytest.raises(fa.DivergedError):
        fa.simulate(fed, make, AutoAlign(fallback=False), 12, 0, local, **more)
    auto = fa.simulate(fed, make, AutoAlign(), 12, 0, local, **more)
    alone = fa.simulate(fed, make, fa.PriorityOnly(), 12, 0, local, **more)
    assert auto.history[-1].train_loss < 2 * alone.history[-1].train_loss


@pytest.mark.parametrize("server", [None, fa.FedAvgM(momentum=0.5), fa.FedAdam(lr=1.0, tau=1.0)])
def test_what_is_measured_is_what_is_served(server):
    measured = set()
    for request in climb(6, lambda model: 0.9, server=server).requests:
        if isinstance(request, Evaluate) and request.split == "heldout":
            measured |= {model for model, _ in request.asked}
        elif isinstance(request, RoundDone):
            assert request.model in measured
            measured = set()


def counted(requests):
    """Count, round by round, the distinct models that each client was sent: to train, or to measure for a decision."""
    found, sent = [], set()
    for request in requests:
        if isinstance(request, Invite):
            sent |= {(request.model, k) for k in request.clients}
        elif isinstance(request, Evaluate) and request.split == "heldout":
            sent |= {(model, k) for model, clients in request.asked for k in clients}
        elif isinstance(request, RoundDone):
            found.append(len(sent))
            sent = set()
    return found


@pytest.mark.parametrize("server", [None, fa.FedAvgM(momentum=0.5)])
@pytest.mark.parametrize("lost", [(), (1,)])
@pytest.mark.parametrize("rule", [AutoAlign(), AutoAlign(cosine=None), AutoAlign((0, 50.0)), AutoAlign(fallback=False)])
def test_costs_are_what_was_sent(rule, lost, server):
    result = climb(6, behind(0.02), rule, server=server, absent=lost)
    assert [r.models_down for r in result.history.rounds] == counted(result.requests)


def test_the_choice_is_measured_on_held_out_data_whatever_is_matched_on():
    result = climb(2, behind(0.02), match_on="train")
    splits = [r.split for r in result.requests if isinstance(r, Evaluate)]
    # F(w), the candidates, test and training scores; then the same, and the priority-only model.
    assert splits == ["train", "heldout", "test", "train", "train", "heldout", "heldout", "test", "train"]


def test_a_small_deficit_is_none():
    result = climb(80, behind(MARGIN * 0.99))
    assert all(r.fallback.apart and not r.fallback.behind for r in result.history.rounds)


def test_without_the_fallback_it_goes_on():
    result = climb(10, behind(0.5), AutoAlign(fallback=False))
    assert all(r.clients[2].decision == "admitted" and r.fallback is None for r in result.history.rounds)
    assert sum(isinstance(r, Invite) for r in result.requests) == 10


def test_costs_by_hand():
    result = climb(2, behind(0.0))
    first, second = result.history.rounds
    # 3 models with the broadcast, 2 candidates to 2 evaluators; up: 3. The priority-only model came for nothing.
    assert (first.models_down, first.models_up, first.samples) == (7, 3, 60)
    # Now they train it, too, and measure what comes of that.
    assert (second.models_down, second.models_up, second.samples) == (7 + 2 + 2, 5, 100)
    kinds = [type(r).__name__ for r in result.requests if not isinstance(r, RoundDone | WhoIsThere)]
    assert kinds[:7] == ["Evaluate", "Invite", "Compare", "Aggregate", "Evaluate", "Evaluate", "Evaluate"]
    assert kinds[7:15] == ["Evaluate", "Invite", "Compare", "Aggregate", "Evaluate", "Invite", "Aggregate", "Evaluate"]


def stored(snapshot):
    """Write a snapshot's values as JSON and read them, as a checkpoint does."""
    return replace(snapshot, values=json.loads(json.dumps(snapshot.values)))


def test_it_goes_on_from_a_snapshot():
    server = fa.FedAvgM(momentum=0.5)
    for kind in (None, server):
        for accuracy in (behind(0.006), behind(0.02)):
            straight = climb(9, accuracy, server=kind)
            for stop in (2, 4, 7):
                at = straight.rounds[stop - 1]
                assert RoundRecord.from_json(at.record.to_json()) == at.record
                later = climb(9, accuracy, server=kind, snapshot=stored(at.snapshot))
                assert later.model == straight.model
                assert later.history.rounds == straight.history.rounds[stop:]


@pytest.mark.parametrize("server", [None, fa.FedAvgM(momentum=0.5)])
def test_it_goes_on_when_no_evaluator_answered(server):
    def accuracy(model):
        return 0.9

    straight = climb(5, accuracy, server=server, silent=0)
    at = straight.rounds[0]
    assert at.record.fallback.apart
    later = climb(5, accuracy, server=server, snapshot=stored(at.snapshot))
    assert later.history.rounds == straight.history.rounds[1:]


def test_the_server_optimiser_moves_both():
    # All is well with the free client, so both models live; the second one is FedAvgM's on the priority clients.
    server = fa.FedAvgM(momentum=0.5)
    tensors = climb(4, lambda model: 0.9, server=server).rounds[-1].snapshot.tensors
    alone = climb(4, lambda model: 0.9, fa.PriorityOnly(), server=server)
    assert set(tensors) == {"model", "training.momentum", "priority_only", "priority_only.momentum"}
    assert tensors["priority_only"] == alone.model
    assert tensors["priority_only.momentum"] == alone.rounds[-1].snapshot.tensors["model.momentum"]


def measures(loss, accuracy):
    return {0: Measure(loss, accuracy, 5), 1: Measure(loss, accuracy, 5)}


@pytest.mark.parametrize(
    ("chosen", "alone", "deficit"),
    [
        ((1.0, 0.5), (9.0, 0.52), 0.02),
        ((1.0, 0.5), (0.5, 0.4), -0.1),
        ((1.0, None), (0.99, None), 0.01),
        ((0.99, None), (1.0, None), -0.01),
        ((1e9, None), (1.0, None), 1.0),  # one bad round counts for no more than some
    ],
)
def test_what_counts_as_behind(chosen, alone, deficit):
    found = assess(ROSTER, Fallback(apart=True), measures(*chosen), measures(*alone))
    assert found.deficit == pytest.approx(SMOOTHING * deficit)
    assert found.behind == (deficit > MARGIN / SMOOTHING)


def test_a_model_whose_loss_is_not_finite_is_left_at_once_and_for_no_longer():
    before = Fallback(apart=True, deficit=0.001)
    found = assess(ROSTER, before, measures(math.inf, 0.9), measures(1.0, 0.1))
    assert (found.behind, found.deficit) == (True, 0.001)
    assert not assess(ROSTER, found, measures(1.0, 0.1), measures(math.nan, 0.9)).behind
    assert not assess(ROSTER, found, measures(1.0, 0.1), measures(1.0, 0.1)).behind


def test_only_those_count_that_measured_both():
    chosen, alone = {0: Measure(1.0, 0.5, 5)}, {0: Measure(1.0, 0.5, 5), 1: Measure(1.0, 1.0, 5)}
    assert assess(ROSTER, Fallback(apart=True), chosen, alone).deficit == 0.0
    before = Fallback(deficit=0.004)
    assert assess(ROSTER, before, {}, alone) == Fallback(apart=True, deficit=0.004)


def test_when_behind_the_model_is_fedavgs_to_the_last_bit(monkeypatch):
    monkeypatch.setattr("fedalign.protocol.fallback.MARGIN", -1.0)  # every choice is
    make = lambda: torch.nn.Linear(6, 4)  # noqa: E731
    local = fa.LocalSGD(lr=0.05, epochs=2, batch_size=10)
    fed = fa.Federation.from_arrays([blobs(40, s) for s in range(6)], priority=[True, True] + [False] * 4)
    auto = fa.simulate(fed, make, AutoAlign(), 9, 0, local, device="cpu")
    alone = fa.simulate(fed, make, fa.PriorityOnly(), 9, 0, local, device="cpu")
    assert auto.history[-1].fallback.behind
    assert torch.equal(auto.model.weight, alone.model.weight)


def test_an_interrupted_run_keeps_its_fallback(tmp_path, monkeypatch):
    settings = ["run", "synth-low", "--arms", "auto", "--seeds", "2", "--rounds", "8", "--set", "warmup=1", "--quiet"]
    assert_resumes_alike(monkeypatch, tmp_path, settings, round=4)
    for seed in (0, 1):
        rounds = RunStore(tmp_path / "whole" / "auto" / f"seed-{seed}").history().rounds
        assert any(r.fallback and r.fallback.apart for r in rounds[:4])
