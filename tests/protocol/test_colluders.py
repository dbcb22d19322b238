"""Colluders are left out of verified rounds, in made-up rounds and in a simulation that no loss would betray."""

from itertools import combinations

import pytest

import fedalign as fa
from fedalign.protocol.resemblance import ALIKE, too_much_alike
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Measure
from fedalign.rules.verified import Verified
from fedalign.testing import MadeUpClients, play

HONEST = {k: 0.20 + 0.01 * (k % 3) for k in range(2, 9)}


def test_nobody_is_too_much_alike_among_honest_clients():
    assert too_much_alike(HONEST, {}, ratio=1.3) == set()


def test_outliers_are_too_much_alike_until_they_were_not_for_many_rounds():
    colluding = {**HONEST, 9: 0.5, 10: 0.5}
    assert too_much_alike(colluding, {}, ratio=1.3) == {9, 10}
    apart = {**HONEST, 9: 0.2, 10: 0.2}
    assert too_much_alike(apart, colluding, ratio=1.3) == {9, 10}  # their past
    assert too_much_alike(colluding, apart, ratio=1.3) == {9, 10}  # this round


def test_the_limit_rises_where_honest_clients_are_alike():
    """Clients of few classes: pairs that share them are as alike as attackers would be."""
    assert too_much_alike(dict(enumerate((0.3, 0.45, 0.6, 0.7, 0.8, 0.85, 0.95))), {}, ratio=1.3) == set()


def test_too_few_clients_have_no_outliers():
    assert too_much_alike({1: 0.1, 2: 0.9, 3: 0.9}, {}, ratio=1.3) == set()
    assert too_much_alike({}, {4: 0.9}, ratio=1.3) == set()


class Helpful(MadeUpClients):
    """All clients send the best model, so that nothing but resemblance speaks against one."""

    def measure(self, model, client, split):
        return Measure(abs(10.0 - model), None, 5)

    def train(self, model, client):
        return 10.0 if client > 1 else model + 1.0


def test_clients_that_are_too_much_alike_are_neither_measured_nor_admitted():
    roster = Roster(tuple(f"c{k}" for k in range(12)), tuple(k < 2 for k in range(12)), (10,) * 12)
    alike = dict.fromkeys(combinations((9, 10, 11), 2), 0.6)
    last = play(Verified(), Helpful(roster, alike=alike), rounds=3).history.rounds[-1]
    assert {k for k, client in enumerate(last.clients) if client.decision == "admitted"} <= set(range(2, 9))
    assert {client.reason for client in last.clients[9:]} == {ALIKE}


def test_a_limit_of_infinity_lets_all_take_part():
    roster = Roster(tuple(f"c{k}" for k in range(12)), tuple(k < 2 for k in range(12)), (10,) * 12)
    alike = dict.fromkeys(combinations((9, 10, 11), 2), 0.6)
    played = play(Verified(alike=float("inf")), Helpful(roster, alike=alike), rounds=3)
    assert ALIKE not in {client.reason for record in played.history.rounds for client in record.clients}


def test_a_limit_below_zero_is_refused():
    with pytest.raises(fa.FedalignError, match="alike must be a number above 0, not -1"):
        Verified(alike=-1)
