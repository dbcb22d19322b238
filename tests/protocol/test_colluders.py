"""Colluders are left out of verified rounds, in made-up rounds and in a simulation that no loss would betray."""

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedalign as fa
from fedalign.protocol.resemblance import ALIKE, COPY, copies, too_much_alike
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Measure
from fedalign.rules.verified import Verified
from fedalign.testing import MadeUpClients, play


def cosines(clients=16, seed=0, usual=-0.05, spread=0.02, **pairs):
    """Cosines of honest clients, around a usual one; ``pairs`` maps "1_2" to the cosine of clients 1 and 2."""
    draw = random.Random(seed)
    found = {(i, j): draw.gauss(usual, spread) for i, j in combinations(range(clients), 2)}
    return found | {tuple(int(k) for k in pair.split("_")): value for pair, value in pairs.items()}


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_too_much_alike_among_honest_clients(seed):
    assert too_much_alike(cosines(seed=seed), {}, spreads=4.0) == set()


@pytest.mark.parametrize("colluders", [(14, 15), (13, 14, 15), (10, 11, 12, 13, 14, 15)])
def test_colluders_are_outliers_two_of_them_too(colluders):
    found = cosines() | dict.fromkeys(combinations(colluders, 2), 0.6)
    assert too_much_alike(found, {}, spreads=4.0) == set(colluders)


@pytest.mark.parametrize("part", [2, 1])
@pytest.mark.parametrize("decoys", [(12,), (12, 13)])
def test_decoys_that_are_like_many_do_not_hide_the_others(decoys, part):
    """Each lifts what is usual: without a search for them, the two others would be as alike as honest clients are."""
    found = cosines() | {(14, 15): 0.3}
    found |= {pair: 0.25 for pair in found for k in set(pair) & set(decoys) if (sum(pair) - k) % part == 0}
    found |= dict.fromkeys(combinations(decoys, 2), 0.9)
    assert too_much_alike(found, {}, spreads=4.0) == {*decoys, 14, 15}


def test_the_past_counts_and_so_does_this_round():
    colluding = cosines() | {(14, 15): 0.6}
    assert too_much_alike(cosines(seed=1), colluding, spreads=4.0) == {14, 15}
    assert too_much_alike(colluding, cosines(seed=1), spreads=4.0) == {14, 15}
    assert (
        too_much_alike(cosines(clients=14), colluding, spreads=4.0) == set()
    )  # they are not among those of this round


def test_the_limit_rises_where_honest_clients_are_alike():
    """Clients of few classes: those that share both are as alike as attackers would be."""
    groups = {(i, j): 0.8 if i % 4 == j % 4 else 0.3 if i % 2 == j % 2 else 0.1 for i, j in combinations(range(16), 2)}
    assert too_much_alike(groups, {}, spreads=4.0) == set()


def test_a_limit_of_infinity_finds_nobody():
    assert too_much_alike(cosines() | {(1, 2): 0.9}, {}, spreads=float("inf")) == set()


@pytest.mark.parametrize("rounding", [-1e-9, 0.0, 1e-9])
def test_a_value_at_the_limit_is_no_outlier_however_it_is_rounded(rounding):
    """Of four clients, the fourth value is as far from the median as four times its part in the upper quartile."""
    found = {(2, 3): -0.015, (2, 4): 0.11 + rounding, (2, 5): -0.1, (3, 4): 0.005, (3, 5): -0.125, (4, 5): 0.11}
    assert too_much_alike(found, {}, spreads=4.0) == set()


def test_too_few_clients_have_no_outliers():
    assert too_much_alike({(1, 2): 0.1, (1, 3): 0.1, (2, 3): 0.9}, {}, spreads=4.0) == set()
    assert too_much_alike({}, {(1, 2): 0.9}, spreads=4.0) == set()


@given(st.integers(0, 10_000), st.integers(4, 20), st.floats(0.1, 9.0))
def test_at_most_all_but_two_clients_are_left_out(seed, clients, spreads):
    draw = random.Random(seed)
    found = {pair: draw.uniform(-1, 1) for pair in combinations(range(clients), 2)}
    assert len(too_much_alike(found, {}, spreads)) <= clients - 2


def test_of_two_copies_one_counts_and_of_more_none():
    found = cosines(8) | {(1, 2): 1.0}
    assert copies(found, [0.1, -0.1]) == {2}
    found |= dict.fromkeys(combinations(range(4, 8), 2), 0.97)
    assert copies(found, [0.1, -0.1]) == {2, 4, 5, 6, 7}


def test_where_priority_clients_are_close_copies_are_closer():
    """Few parameters, or few classes: honest updates are close as well."""
    found = cosines(8) | {(1, 2): 0.97}
    assert copies(found, [0.9, 0.2]) == set()
    assert copies(found | {(1, 2): 0.999}, [0.9, 0.2]) == {2}
    assert copies(found | {(1, 2): 1.0}, [1.0]) == {2}  # two priority clients with the same data


def test_one_priority_client_shows_nothing_about_copies():
    assert copies({(1, 2): 0.96, (1, 3): 0.2, (2, 3): 0.2}, []) == {2}


@given(st.integers(0, 10_000), st.integers(3, 20), st.floats(-1, 1))
def test_a_group_of_copies_leaves_at_most_one_client(seed, clients, closest):
    draw = random.Random(seed)
    sent = [draw.randrange(4) for _ in range(clients)]
    found = {(i, j): 1.0 if sent[i] == sent[j] else -1.0 for i, j in combinations(range(clients), 2)}
    kept = set(range(clients)) - copies(found, [closest])
    for what in set(sent):
        group = {k for k in range(clients) if sent[k] == what}
        assert kept & group == ({min(group)} if len(group) <= 2 else set())


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


def test_a_majority_of_copies_is_neither_measured_nor_admitted():
    """Seven of ten send one update, and are what is usual: nobody would be an outlier."""
    roster = Roster(tuple(f"c{k}" for k in range(12)), tuple(k < 2 for k in range(12)), (10,) * 12)
    alike = dict.fromkeys(combinations(range(5, 12), 2), 1.0)
    last = play(Verified(), Helpful(roster, alike=alike), rounds=3).history.rounds[-1]
    assert {client.reason for client in last.clients[5:]} == {COPY}
    assert {k for k, client in enumerate(last.clients) if client.decision == "admitted"} <= {2, 3, 4}


def test_a_limit_of_infinity_lets_all_take_part():
    roster = Roster(tuple(f"c{k}" for k in range(12)), tuple(k < 2 for k in range(12)), (10,) * 12)
    alike = dict.fromkeys(combinations((9, 10, 11), 2), 0.6)
    played = play(Verified(alike=float("inf")), Helpful(roster, alike=alike), rounds=3)
    assert ALIKE not in {client.reason for record in played.history.rounds for client in record.clients}


def test_a_limit_below_zero_is_refused():
    with pytest.raises(fa.FedalignError, match="alike must be a number above 0, not -1"):
        Verified(alike=-1)
