"""Blended AutoALIGN: weights of the candidates, rounds by hand, both engines, hostile clients, interruptions."""

import math

import pytest
from conftest import assert_resumes_alike, blobs, linear
from hypothesis import given
from hypothesis import strategies as st

import fedalign as fa
from fedalign.protocol.messages import Evaluate, Invite
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Measure, Similarity
from fedalign.testing import MadeUpClients, play

LOCAL = fa.LocalSGD(lr=0.1, epochs=2, batch_size=10)
GOAL = 3.0


def federation(samples=30):
    """Two priority clients with little data, three free clients of the same kind, three whose labels are shifted."""
    train = [blobs(samples, 10 + k) for k in range(5)] + [blobs(60, 20 + k, shift=1.0) for k in range(3)]
    test = [blobs(200, 50 + k, shift=float(k > 4)) for k in range(8)]
    return fa.Federation.from_arrays(train, test=test, priority=[k < 2 for k in range(8)], heldout_fraction=0.4)


def simulate(rule, rounds=4, **options):
    return fa.simulate(federation(), linear, rule, rounds, 0, LOCAL, device="cpu", **options)


class Line(MadeUpClients):
    """Models are numbers, client 0 is the priority client, its loss is (model − 3)², and each client adds a number."""

    def __init__(self, *moves, samples=5, **options):
        names = tuple("abcdefg"[: len(moves)])
        super().__init__(Roster(names, tuple(k == 0 for k in range(len(moves))), (10,) * len(moves)), **options)
        self.moves, self.samples = moves, samples

    def train(self, model, client):
        return model + self.moves[client]

    def measure(self, model, client, split):
        return Measure((model - GOAL) ** 2, None, self.samples)

    def similarity(self, client):
        return Similarity(1.0, abs(self.moves[client]))


losses = st.lists(st.one_of(st.floats(0, 100), st.just(math.inf), st.just(math.nan)), min_size=2, max_size=9)


@given(losses, st.integers(1, 10_000), st.booleans(), st.floats(0.1, 100))
def test_weights_are_a_mean_of_the_best(losses, samples, kept, caution):
    weights = fa.Blend(caution=caution).weigh(losses, samples, kept)
    assert math.fsum(weights) == pytest.approx(1)
    assert all(0 <= weight <= 1 for weight in weights)
    finite = [loss for loss in losses if math.isfinite(loss)]
    assert all(weight == 0 for loss, weight in zip(losses, weights, strict=True) if finite and not math.isfinite(loss))
    if finite:
        mean = math.fsum(w * loss for w, loss in zip(weights, losses, strict=True) if w)
        assert mean <= min(finite) + math.log(2 * len(losses)) * caution / samples + 1e-4 * max(finite)
    else:
        assert weights[0] == 1


def test_before_losses_differ_the_kept_model_weighs_as_much_as_all_others():
    assert fa.Blend().weigh([1.0, 1.0, 1.0, 1.0], samples=10, kept=True) == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])


@pytest.mark.parametrize("caution", [0, -1, math.nan, math.inf, True, "x"])
def test_a_bad_caution_is_refused(caution):
    with pytest.raises(fa.FedalignError, match="caution must be a number above 0"):
        fa.Blend(caution=caution)


def test_a_round_by_hand():
    """Candidates: the priority client's model, 1, and the mean with the free client's, 2. Losses: 4 and 1."""
    rule = fa.Blend(calibrated=False, caution=20.0)
    played = play(rule, Line(1.0, 3.0, samples=10))
    light, heavy = math.exp(-10 * 3 / 20), 1.0
    part = heavy / (light + heavy)
    assert played.model == pytest.approx((1 - part) * 1.0 + part * 2.0)
    record = played.history[0]
    assert [one.chosen for one in record.tried] == [False, True]
    assert [c.decision for c in record.clients] == ["trained", "admitted"]
    assert record.clients[1].weight == pytest.approx(part / 2)
    assert f"{part:.3g}" in record.clients[1].reason


def test_the_kept_model_is_trained_on_and_a_candidate():
    """Its history goes on where the training model's is another one, and costs the priority clients one training."""
    played = play(fa.Blend(calibrated=False), Line(1.0, 3.0, samples=4), rounds=2)
    trained = [request for request in played.requests if isinstance(request, Invite)]
    assert [request.clients for request in trained if len(request.clients) == 1] == [(0,), (0,)]  # kept, priority-only
    measured = [len(request.asked) for request in played.requests if isinstance(request, Evaluate)]
    assert max(measured) == 4  # two sets, the kept model, and the priority-only model
    assert played.rounds[0].model in [request.model for request in trained if len(request.clients) == 1]


def test_without_a_fallback_no_priority_only_model_is_trained():
    played = play(fa.Blend(fallback=False), Line(1.0, 3.0), rounds=3)
    assert not any(name.startswith("priority_only") for name in played.rounds[-1].snapshot.tensors)
    assert all(record.fallback is None for record in played.history.rounds)


def test_a_blend_that_harms_is_not_served():
    """The free client lowers no candidate's loss, so the priority clients' own model is served to the last bit."""
    alone = play(fa.PriorityOnly(), Line(0.5, -40.0), rounds=3)
    played = play(fa.Blend(caution=1000.0, calibrated=False), Line(0.5, -40.0), rounds=3)
    assert played.history[-1].fallback.behind
    assert played.model == alone.model
    assert played.history[-1].clients[1].decision != "admitted"


def test_nobody_offers():
    alone = simulate(fa.PriorityOnly()).history
    found = simulate(fa.Blend(ladder=(0.0,))).history
    assert [record.test_loss for record in found] == [record.test_loss for record in alone]


@pytest.mark.parametrize("attack", ["not-finite", "zero", "scaling(factor=1e30)", "sign-flip(scale=1000)", "copied"])
def test_no_attack_ends_a_run(attack):
    history = simulate(fa.Blend(), adversary=fa.Adversary(attack, fraction=0.5)).history
    assert len(history) == 4
    assert all(math.isfinite(record.test_loss) for record in history)


def test_it_serves_friends_and_not_the_others():
    """Few held-out samples: AutoALIGN's choice among candidates is chance, the blend is not worse than it."""
    alone, blended = (simulate(rule, 25).history for rule in (fa.PriorityOnly(), fa.Blend()))
    assert blended.final("test_accuracy") > alone.final("test_accuracy") + 0.02


def test_both_engines_agree():
    found = [simulate(fa.Blend(), engine=engine).history for engine in ("batched", "reference")]
    for one, other in zip(*(history.rounds for history in found), strict=True):
        assert [c.decision for c in one.clients] == [c.decision for c in other.clients]
        assert [c.weight for c in one.clients] == pytest.approx([c.weight for c in other.clients], abs=1e-3)
        assert one.test_loss == pytest.approx(other.test_loss, rel=1e-3)


def test_few_clients_in_a_round():
    for record in simulate(fa.Blend(), participation=fa.Uniform(0.5)).history:
        assert record.skipped or math.fsum(c.weight for c in record.clients) == pytest.approx(1)


def test_it_survives_an_interruption(tmp_path, monkeypatch):
    settings = ["run", "synth-low", "--arms", "blend", "--seeds", "1", "--rounds", "6", "--quiet"]
    settings += ["--set", "data.samples=40", "--set", "server.kind=fedavgm", "--set", "arm.blend.caution=2.0"]
    assert_resumes_alike(monkeypatch, tmp_path, settings, round=4)
