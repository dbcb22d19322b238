"""Rules and names of version 0.1 still work, and warn."""

import warnings

import pytest
from conftest import federation, flat, linear

import fedalign as fa
from fedalign.protocol.roster import Roster
from fedalign.testing import MadeUpClients, play
from fedalign.training.server import ServerModel

ROSTER = Roster(("a", "b", "c", "d", "e"), (True, True, False, False, False), (30, 10, 20, 20, 40))
LOSS = {0: 1.0, 1: 2.0, 2: 1.2, 3: 0.1, 4: 9.0}  # F = 1.25
TRAINED = {0: 10.0, 1: 20.0, 2: 40.0, 3: 50.0, 4: 60.0}
COSINES = {2: 0.9, 3: -0.9, 4: 0.1}


def decisions(rule):
    played = play(rule, MadeUpClients(ROSTER, LOSS, TRAINED, cosines=COSINES))
    return [client.decision for client in played.history[0].clients[2:]]


def test_candidate_is_a_selection():
    with pytest.warns(DeprecationWarning, match=r"fedalign\.Candidate is called fedalign\.Selection now"):
        made = fa.Candidate(0.3, (2, 4), {2: 0.5}, reasons={3: "too far"})
    assert made == fa.Selection((2, 4), weight={2: 0.5}, reasons={3: "too far"}, epsilon=0.3)
    with pytest.warns(DeprecationWarning, match="Selection"):
        every = fa.Candidate(None, (2,), {2: 0.5}, {2: 2.0}, {2: 3.0}, {2: "near"})
    assert every == fa.Selection((2,), weight={2: 0.5}, scale={2: 2.0}, step={2: 3.0}, reasons={2: "near"})


def test_a_rule_with_admits():
    with pytest.warns(DeprecationWarning, match=r"Near\.admits is the interface of version 0\.1; define select"):

        class Near(fa.Rule):
            def offers(self, own, broadcast):
                return own.loss <= broadcast.loss + 1

            def admits(self, own, broadcast):
                return abs(own.loss - broadcast.loss) <= 1

    assert decisions(Near()) == ["admitted", "refused", "declined"]


def test_it_decides_as_fedalign_does():
    with pytest.warns(DeprecationWarning, match=r"Same\.admits"):

        class Same(fa.Rule):
            def offers(self, own, broadcast):
                return fa.Align(0.3).offers(own, fa.Broadcast(broadcast.round, broadcast.loss, None, 0.3))

            def admits(self, own, broadcast):
                return fa.Align(0.3).admits(own, fa.Broadcast(broadcast.round, broadcast.loss, None, 0.3))

    local = fa.LocalSGD(lr=0.05, epochs=1, batch_size=10)
    old, new = (fa.simulate(federation(), linear, rule, 5, 0, local, device="cpu") for rule in (Same(), fa.Align(0.3)))
    assert flat(old.model).equal(flat(new.model))
    assert any(record.admitted for record in old.history.rounds)


@pytest.mark.parametrize("base", [fa.Rule, fa.Everyone])
def test_a_rule_with_candidates(base):
    with pytest.warns(DeprecationWarning, match=r"Two\.candidates is the interface of version 0\.1"):

        class Two(base):
            def offers(self, own, broadcast):
                return True

            def candidates(self, own, broadcast):
                lowest = sorted(own, key=lambda k: own[k].loss)[:2]
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    return [fa.Candidate(None, tuple(sorted(lowest)), scale={3: 2.0}, reasons={4: "the third"})]

    played = play(Two(), MadeUpClients(ROSTER, LOSS, TRAINED))
    record = played.history[0]
    assert [client.decision for client in record.clients[2:]] == ["admitted", "admitted", "refused"]
    assert record.clients[4].reason == "the third"
    assert record.clients[3].weight == pytest.approx(2 * record.clients[2].weight)


def test_a_rule_that_compares_updates():
    with pytest.warns(DeprecationWarning, match=r"Along\.compare is the interface of version 0\.1"):

        class Along(fa.Rule):
            needs_updates = True

            def offers(self, own, broadcast):
                return True

            def compare(self, own, similar, broadcast):
                assert set(own) == set(similar)
                return [fa.Selection(tuple(k for k in own if similar[k].cosine > 0 and own[k].loss < 5))]

    assert decisions(Along()) == ["admitted", "refused", "refused"]


def test_a_rule_that_gives_several_candidates_is_told_what_to_write():
    with pytest.warns(DeprecationWarning, match="candidates"):

        class Several(fa.Everyone):
            def candidates(self, own, broadcast):
                return [fa.Selection(), fa.Selection(tuple(own))]

    with pytest.raises(
        fa.FedalignError, match="Several gave 2 candidates; to choose among several, subclass AutoAlign"
    ):
        decisions(Several())


def test_hooks_of_version_0_1_that_nobody_would_call_are_refused():
    class Compares(fa.AutoAlign):
        def compare(self, own, similar, broadcast):
            return []

    class Based(fa.AutoAlign):
        def base(self, own, similar, broadcast):
            return {}

    for rule, message in (
        (Compares(), r"Compares\.compare is the interface of version 0\.1; define candidates\(offers, broadcast\)"),
        (Based(), r"Based\.base is the interface of version 0\.1; define training_set\(offers, broadcast\)"),
    ):
        with pytest.raises(fa.FedalignError, match=message):
            fa.simulate(federation(), linear, rule, 1, device="cpu")


def test_a_rule_without_a_decision_is_refused_before_any_work():
    class Open(fa.Rule):
        def offers(self, own, broadcast):
            return True

    with pytest.raises(fa.FedalignError, match=r"Open defines no select\(offers, broadcast\)"):
        fa.simulate(federation(), linear, Open(), 1, device="cpu")


def test_names_that_are_of_this_version_do_not_warn():
    class Closer(fa.Align):
        def admits(self, own, broadcast):
            return own.loss <= broadcast.loss

    class Fewer(fa.AutoAlign):
        def candidates(self, offers, broadcast):
            return super().candidates(offers, broadcast)[:1]

    class Own(fa.Everyone):
        def admits(self, own):
            return True

        def select(self, offers, broadcast):
            return fa.Selection(tuple(k for k, offer in offers.items() if self.admits(offer)))

    assert decisions(Closer(10)) == ["admitted", "admitted", "refused"]
    assert decisions(Fewer()) == ["base", "refused", "base"]  # d's update points away, so the training model lacks it
    assert decisions(Own()) == ["admitted"] * 3


def test_a_server_optimiser_of_version_01_keeps_its_tuple():
    class Half(fa.ServerOptimizer):
        def step(self, model, mean, memory):
            (speed,) = memory or (0.0,)
            speed = speed / 2 + (mean - model)
            return model + speed, (speed,)

    with pytest.warns(DeprecationWarning, match="return a dictionary by name"):
        first = ServerModel(0.0).step(1.0, Half())
    assert first.named("model") == {"model": 1.0, "model.0": 1.0}
    with pytest.warns(DeprecationWarning, match="return a dictionary by name"):
        second = ServerModel.restore("model", first.named("model")).step(1.0, Half())
    assert second.weights == 1.5


def test_a_participation_of_version_01_draws_its_jury():
    class Chosen(fa.Participation):
        def draw(self, round, roster, seed):
            return fa.Presence((True,) * len(roster))

        def jury(self, round, roster, seed):
            return fa.Presence((True, False))

    with pytest.warns(DeprecationWarning, match="draw_evaluators"):
        assert Chosen().draw_evaluators(0, None, 0).reachable == (True, False)
