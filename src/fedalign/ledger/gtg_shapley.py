"""GTG-Shapley: Shapley values from sampled orders of the clients, with guided sampling and truncation.

Liu et al., "GTG-Shapley: Efficient and accurate participant contribution evaluation in federated learning" (2022,
arXiv:2109.02053). A client's Shapley value is its mean marginal gain over all orders in which clients could join. The
paper guides the sample so that every client comes first equally often, because the first places matter most. Here
the first and the last place are not sampled at all: the gains of every client alone, and of all but one, are measured,
and orders are sampled for the places in between.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, variance

import numpy as np

from fedalign.errors import FedalignError
from fedalign.ledger.exact import all_coalitions, shapley_values
from fedalign.ledger.valuation import Coalition, Estimate, Estimates, Estimating, Gains, Game, Valuation
from fedalign.training.randomness import Purpose, permutation

_TURNS = 4  # orders that are made of one drawn order, each beginning at another place of it
# The 97.5 % points of Student's t for 1, 2, … degrees of freedom; SciPy is no dependency.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


@dataclass(frozen=True)
class GTGShapley(Valuation):
    """Shapley values from ``permutations`` sampled orders, with 95 % intervals.

    An order is cut where the gain is within ``truncation`` of that of all clients: those that follow share the rest
    equally. A round in which all clients together, every one alone and all but one gain at most ``between`` is not
    sampled, and all are worth 0. Gains of all together alone would not do: those of good and bad clients may cancel.
    Both are parts of the priority clients' loss. Values are exact where all coalitions are at most twice
    the sample.

    >>> from fedalign.ledger.valuation import solve
    >>> found = solve(GTGShapley(permutations=8), Game(tuple(range(9))), lambda s: len(s) ** 0.5)
    >>> round(sum(one.value for one in found.values()), 9), found[0].low <= 1 / 3 <= found[0].high
    (3.0, True)
    """

    permutations: int = 4
    truncation: float = 1e-4
    between: float = 1e-5

    def __post_init__(self) -> None:
        whole = isinstance(self.permutations, numbers.Integral) and not isinstance(self.permutations, bool)
        if not whole or not 2 <= self.permutations <= 10_000:
            raise FedalignError(
                f"ledger.permutations must be a whole number from 2 to 10000, not {self.permutations!r}"
            )
        for name in ("truncation", "between"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise FedalignError(f"ledger.{name} must be a part of the loss, from 0 to below 1, not {value!r}")

    def estimate(self, game: Game) -> Estimating:
        """Ask for everyone and the first and last places, then what decides truncation, then the other places."""
        n, everyone = len(game.players), game.everyone
        if n == 0:
            return {}
        ends = [one for k in game.players for one in (frozenset({k}), everyone - {k}) if one]
        gains = yield [everyone, *ends]
        small = self.between * game.scale
        if all(abs(gains[one]) <= small for one in (everyone, *ends)):
            return dict.fromkeys(game.players, Estimate(0.0, -small, small))
        if 2**n <= 2 * (2 * n + self.permutations * max(0, n - 3)):
            gains = yield all_coalitions(game)
            return {k: Estimate.exactly(value) for k, value in shapley_values(game, gains).items()}
        orders = sampled_orders(game, self.permutations)
        halves = [n >> i for i in range(1, n.bit_length()) if 2 <= n >> i <= n - 2]
        gains = yield [frozenset(order[:size]) for order in orders for size in halves]
        cuts = [self._cut(game, order, halves, gains) for order in orders]
        gains = yield [
            frozenset(order[:size])
            for order, cut in zip(orders, cuts, strict=True)
            for size in range(2, min(cut, n - 2) + 1)
        ]
        middle: dict[int, list[float]] = {k: [] for k in game.players}
        for order, cut in zip(orders, cuts, strict=True):
            marginals = _marginals(order, cut, gains)
            for place in range(1, n - 1):
                middle[order[place]].append(marginals[place])
        return _estimates(game, gains, middle)

    def _cut(self, game: Game, order: Sequence[int], halves: Sequence[int], gains: Gains) -> int:
        """Return after how many clients an order is truncated: the fewest from which on all measured gains agree."""
        cut, near = len(order), self.truncation * game.scale
        for size in halves:  # the largest first
            if abs(gains[game.everyone] - gains[frozenset(order[:size])]) > near:
                break
            cut = size
        return cut


def sampled_orders(game: Game, count: int) -> list[list[int]]:
    """Draw orders of the players. A few in a row are turns of one order, so that places are spread over clients.

    >>> sampled_orders(Game((7, 8, 9, 10)), 2)[1] == sampled_orders(Game((7, 8, 9, 10)), 5)[1]
    True
    """
    n, orders = len(game.players), []
    for number in range(count):
        drawn, turn = divmod(number, _TURNS)
        order = permutation(n, game.seed, Purpose.LEDGER, game.round, game.part, drawn)
        orders.append([game.players[i] for i in np.roll(order, turn * n // _TURNS)])
    return orders


def _marginals(order: Sequence[int], cut: int, gains: Gains) -> list[float]:
    """Return what every place of an order adds; those behind the cut share what is left."""
    reached = [0.0, *(gains[frozenset(order[:size])] for size in range(1, cut + 1))]
    rest, left = gains[frozenset(order)] - reached[-1], len(order) - cut
    return [*(after - before for before, after in pairwise(reached)), *(rest / left for _ in range(left))]


def _estimates(game: Game, gains: Gains, middle: Mapping[int, Sequence[float]]) -> Estimates:
    """Join the first, the last and the sampled places, so that all values add up to the gain of everyone.

    What is missing to that is shared in proportion to the variances: a client whose value is certain keeps it.
    """
    n, everyone = len(game.players), game.everyone
    pooled = fmean([variance(seen) for seen in middle.values() if len(seen) > 1] or [0.0])
    values, errors = {}, {}
    for k, seen in middle.items():
        ends = gains[_only(k)] + gains[everyone] - gains[everyone - {k}]
        values[k] = (ends + (n - 2) * (fmean(seen) if seen else ends / 2)) / n
        own = variance(seen) if len(seen) > 1 else pooled
        # A client that adds nothing anywhere has no variance; others' small samples may miss their rare large gains.
        spread = (own + pooled) / 2 if own or not seen else 0.0
        errors[k] = (n - 2) / n * math.sqrt(spread / max(1, len(seen)))
    missing = gains[everyone] - math.fsum(values.values())
    total = math.fsum(error**2 for error in errors.values())
    found = {}
    for k, value in values.items():
        value += missing * errors[k] ** 2 / total if total else 0.0
        width = errors[k] * student(len(middle[k]) - 1)
        found[k] = Estimate(value, value - width, value + width)
    return found


def _only(k: int) -> Coalition:
    return frozenset({k})


def student(degrees: int) -> float:
    """Return the 97.5 % point of Student's t.

    >>> student(1), student(20), round(student(100), 2)
    (12.706, 2.086, 1.98)
    """
    if degrees <= len(_STUDENT):
        return _STUDENT[max(0, degrees - 1)]
    return 1.95996 + 2.3723 / degrees + 2.82 / degrees**2
