"""Shapley values of clients: GTG-Shapley against all coalitions, and coalitions against runs of their own."""

from itertools import permutations

import pytest
from conftest import blobs, federation, linear

import fedalign as fa
from fedalign.ledger.exact import ExactShapley, all_coalitions
from fedalign.ledger.gtg_shapley import GTGShapley
from fedalign.ledger.valuation import solve

SIZES = (60, 60, 90, 20, 60, 35, 75, 50, 40, 100)
SHIFTS = (0.0, 0.0, 0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)
LOCAL = fa.LocalSGD(lr=0.3, epochs=2, batch_size=20)


class Everything(fa.Valuation):
    """Asks for all coalitions, and keeps their gains for a test."""

    def __init__(self):
        self.gains = []

    def estimate(self, game):
        gains = yield all_coalitions(game)
        self.gains.append(dict(gains))
        return {k: fa.Estimate.exactly(0.0) for k in game.players}


def run(ledger, *, rounds=3, seed=0, rule=None, sizes=SIZES, shifts=SHIFTS, fed=None, **options):
    fed = fed or federation(sizes, [k < 2 for k in range(len(sizes))], shifts, heldout_fraction=0.3)
    return fa.simulate(
        fed, linear, rule or fa.Everyone(), rounds, 0, LOCAL, device="cpu", seed=seed, ledger=ledger, **options
    )


def values(record, free=True):
    roles = {client.id: client.priority for client in record.clients}
    return {one.id: one for one in record.ledger.clients if roles[one.id] != free}


def brute_force(players, gains):
    """Average a client's marginal gains over all orders."""
    found, orders = dict.fromkeys(players, 0.0), list(permutations(players))
    for order in orders:
        before, seen = 0.0, frozenset()
        for k in order:
            seen |= {k}
            found[k] += gains[seen] - before
            before = gains[seen]
    return {k: total / len(orders) for k, total in found.items()}


def test_gtg_shapley_of_eight_clients_is_brute_force_within_its_interval():
    """Of 95 % intervals at most one in twenty may miss, and of sums over a run's rounds hardly any."""
    missed = total = 0
    for seed in range(10):
        everything = Everything()
        run(fa.Ledger(everything, priority=False), seed=seed)
        sampled = run(fa.Ledger(GTGShapley(permutations=8), priority=False), seed=seed).history.rounds
        exact = run(fa.Ledger(ExactShapley(), priority=False), seed=seed).history.rounds
        for gains, estimated, right in zip(everything.gains, sampled, exact, strict=True):
            true = {k: one.gave for k, one in values(right).items()}
            if seed == 0:
                assert true == pytest.approx(brute_force(range(2, 10), gains))
            assert sum(true.values()) == pytest.approx(right.ledger.free_gain)
            assert sum(one.gave for one in values(estimated).values()) == pytest.approx(right.ledger.free_gain)
            assert estimated.ledger.models < right.ledger.models / 2
            missed += sum(not one.low <= true[k] <= one.high for k, one in values(estimated).items())
            total += 8
    assert missed <= 0.05 * total


def test_ranks_over_a_run_are_those_of_exact_values():
    """Clients from harmless to hostile, with equally many samples; sampled orders rank them as all orders do."""
    totals = []
    shifts = (0.0, 0.0, 0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)
    for method in (GTGShapley(permutations=16), ExactShapley()):
        ledger = fa.Ledger(method, priority=False)
        records = run(ledger, rounds=6, sizes=(40, 40, *(90,) * 8), shifts=shifts).history.rounds
        totals.append({k: sum(values(r)[k].gave for r in records) for k in range(2, 10)})
    ranks = [sorted(own, key=own.__getitem__) for own in totals]
    assert records[0].ledger.method == "exact"
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("players", [4, 10])
def test_clients_whose_gains_cancel_have_their_values(players):
    worth = {k: 1.0 if k % 2 else -1.0 for k in range(players)}
    found = solve(GTGShapley(), fa.Game(tuple(range(players))), lambda coalition: sum(worth[k] for k in coalition))
    assert {k: one.value for k, one in found.items()} == pytest.approx(worth)
    nothing = solve(GTGShapley(), fa.Game(tuple(range(players))), lambda coalition: 1e-7 * len(coalition))
    assert {(one.value, one.high) for one in nothing.values()} == {(0.0, 1e-5)}


def test_intervals_cover_in_made_up_games():
    """Of 95 % intervals, few may miss: here clients' gains interact, and sizes of coalitions count less and less."""
    missed = 0
    for seed in range(40):
        worth = {k: ((k * 37 + seed * 11) % 17 - 4) / 10 for k in range(8)}

        def gain(coalition, worth=worth):
            total = sum(worth[k] for k in coalition)
            pairs = sum(0.05 for k in coalition if k + 1 in coalition)
            return total / (1 + 0.3 * len(coalition)) + pairs

        game = fa.Game(tuple(range(8)), seed=seed)
        right, found = solve(ExactShapley(), game, gain), solve(GTGShapley(permutations=8), game, gain)
        missed += sum(not found[k].low <= right[k].value <= found[k].high for k in range(8))
    assert missed <= 0.05 * 40 * 8


def test_a_coalition_is_measured_as_a_run_without_the_others():
    """The gain of the first free clients is that of a federation which has no others."""

    def first(count):
        data = [blobs(n, 10 + k, shift=s) for k, (n, s) in enumerate(zip(SIZES, SHIFTS, strict=True))]
        return fa.Federation.from_arrays(data[:count], priority=[k < 2 for k in range(count)], heldout_fraction=0.3)

    everything = Everything()
    run(fa.Ledger(everything, calibrated=False, priority=False), rounds=1, fed=first(10))
    (gains,) = everything.gains
    own = run(None, rounds=1, rule=fa.PriorityOnly(), fed=first(3)).history[0].heldout_loss
    for count in (1, 3, 8):
        loss = run(None, rounds=1, fed=first(2 + count)).history[0].heldout_loss
        assert gains[frozenset(range(2, 2 + count))] == pytest.approx(own - loss, rel=1e-4)


@pytest.mark.parametrize("rule", [fa.Everyone(), fa.Align(0.5), fa.AutoAlign(), fa.Verified(fa.Align(0.5))])
def test_values_add_up_to_what_the_round_gains(rule):
    for record in run(fa.Ledger(ExactShapley()), rule=rule).history.rounds:
        counted = [one for one in record.ledger.clients if one.gave is not None]
        valued = record.ledger
        if len(counted) == sum(c.decision in ("trained", "admitted", "base") for c in record.clients):
            priority = sum(one.gave for one in values(record, free=False).values())
            assert priority == pytest.approx(valued.gain - valued.free_gain, abs=1e-9)


def test_priority_clients_with_the_same_data_have_the_same_value():
    same = [blobs(60, 3)] * 2
    fed = fa.Federation.from_arrays([*same, blobs(30, 4)], heldout=[blobs(30, 9)] * 3, priority=[True, True, False])
    local = fa.LocalSGD(lr=0.3, epochs=1, batch_size="full")
    record = fa.simulate(fed, linear, fa.Everyone(), 1, 0, local, device="cpu", ledger="exact").history[0]
    first, second = (values(record, free=False)[k].gave for k in (0, 1))
    assert first == pytest.approx(second)
    assert first > 0
