"""Shapley values from all coalitions, and leave-one-out values."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from itertools import combinations

from fedalign.errors import FedalignError
from fedalign.ledger.valuation import Coalition, Estimate, Estimating, Gains, Game, Valuation


@dataclass(frozen=True)
class ExactShapley(Valuation):
    """Shapley values by their definition, from the gains of all 2ⁿ coalitions of at most ``most`` clients.

    >>> from fedalign.ledger.valuation import solve
    >>> glove = solve(ExactShapley(), Game((1, 2, 3)), lambda s: float(1 in s and len(s) > 1))
    >>> [round(glove[k].value, 4) for k in (1, 2, 3)]
    [0.6667, 0.1667, 0.1667]
    """

    most: int = 10

    def __post_init__(self) -> None:
        whole = isinstance(self.most, numbers.Integral) and not isinstance(self.most, bool)
        if not whole or not 1 <= self.most <= 16:
            raise FedalignError(f"ledger.most must be a whole number from 1 to 16, not {self.most!r}")

    def most_players(self) -> int:
        """Return the limit: every further client doubles the number of models."""
        return self.most

    def estimate(self, game: Game) -> Estimating:
        """Ask for all coalitions."""
        gains = yield all_coalitions(game)
        return {k: Estimate.exactly(value) for k, value in shapley_values(game, gains).items()}


def all_coalitions(game: Game) -> list[Coalition]:
    """List all coalitions of a game's players but the empty one.

    >>> len(all_coalitions(Game((4, 5, 6))))
    7
    """
    sizes = range(1, len(game.players) + 1)
    return [frozenset(some) for size in sizes for some in combinations(game.players, size)]


def shapley_values(game: Game, gains: Gains) -> dict[int, float]:
    """Return the Shapley values of a game all of whose gains are known."""
    n = len(game.players)
    weight = [1 / (n * math.comb(n - 1, size)) for size in range(n)]
    coalitions = [frozenset(), *all_coalitions(game)]
    return {
        k: math.fsum(weight[len(one)] * (gains[one | {k}] - gains[one]) for one in coalitions if k not in one)
        for k in game.players
    }


@dataclass(frozen=True)
class LeaveOneOut(Valuation):
    """What is lost without a client, if all others take part. Two clients that replace each other are worth nothing.

    >>> from fedalign.ledger.valuation import solve
    >>> glove = solve(LeaveOneOut(), Game((1, 2, 3)), lambda s: float(1 in s and len(s) > 1))
    >>> [glove[k].value for k in (1, 2, 3)]
    [1.0, 0.0, 0.0]
    """

    def estimate(self, game: Game) -> Estimating:
        """Ask for the coalition of all players, and for those without one."""
        everyone = game.everyone
        gains = yield [everyone, *(everyone - {k} for k in game.players)]
        return {k: Estimate.exactly(gains[everyone] - gains[everyone - {k}]) for k in game.players}
