"""What a valuation method is: it asks for the gains of coalitions, and says what each client is worth.

A *coalition* is a set of clients, and its *gain* says by how much the aggregate of their updates lowers the priority
clients' loss. Nothing is trained again: a coalition's model is made of updates that the server has.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedalign.errors import FedalignError

Coalition = frozenset[int]
Gains = Mapping[Coalition, float]


@dataclass(frozen=True)
class Game:
    """The clients to value in a round.

    ``scale`` is the priority clients' loss without them, in the unit of the gains. ``seed``, ``round`` and ``part`` are
    for methods that draw random numbers: they hash them, and never remember a state.

    >>> game = Game((3, 5), scale=2.0)
    >>> sorted(game.everyone)
    [3, 5]
    """

    players: tuple[int, ...]
    scale: float = 1.0
    seed: int = 0
    round: int = 0
    part: int = 0  #: 0: the free clients, 1: the priority clients

    @property
    def everyone(self) -> Coalition:
        """The coalition of all players."""
        return frozenset(self.players)


@dataclass(frozen=True)
class Estimate:
    """What a client gave, with a 95 % interval; of a value that is not estimated, all three are the same."""

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Estimate:
        """Return a value that is not estimated.

        >>> Estimate.exactly(0.5)
        Estimate(value=0.5, low=0.5, high=0.5)
        """
        return cls(value, value, value)


Estimates = Mapping[int, Estimate]
Estimating = Generator[Collection[Coalition], Gains, Estimates]


class Valuation(abc.ABC):
    """A way to value clients. Subclass it and define :meth:`estimate`.

    >>> class Alone(Valuation):
    ...     '''What each client is worth with no other one.'''
    ...     def estimate(self, game):
    ...         gains = yield [frozenset({k}) for k in game.players]
    ...         return {k: Estimate.exactly(gains[frozenset({k})]) for k in game.players}
    >>> solve(Alone(), Game((3, 5)), lambda coalition: float(sum(coalition)))[5].value
    5.0
    """

    def most_players(self) -> int | None:
        """Return how many clients can be valued at once; None: any number."""
        return None

    @abc.abstractmethod
    def estimate(self, game: Game) -> Estimating:
        """Yield coalitions to measure, be sent the gains of all that were measured so far, and return the values.

        The gain of the empty coalition is 0 and always known. Coalitions that were measured before cost nothing.
        """


def solve(method: Valuation, game: Game, gain: Any) -> Estimates:
    """Value the players of a game whose gains are a function of the coalition."""
    known: dict[Coalition, float] = {frozenset(): 0.0}
    asking = method.estimate(game)
    try:
        wanted = next(asking)
        while True:
            known |= {one: float(gain(one)) for one in wanted if one not in known}
            wanted = asking.send(known)
    except StopIteration as end:
        return checked(method, game, end.value)


def checked(method: Valuation, game: Game, found: Any) -> Estimates:
    """Return what a method found; raises :class:`FedalignError` if it did not value exactly the players."""
    values = isinstance(found, Mapping) and all(isinstance(one, Estimate) for one in found.values())
    if not values or set(found) != set(game.players):
        raise FedalignError(f"{type(method).__name__}.estimate must return an Estimate for every player of the game")
    return {k: found[k] for k in game.players}


def check_coalitions(method: Valuation, game: Game, wanted: Iterable[Any]) -> list[Coalition]:
    """Return coalitions that a method asks for, each once; raises :class:`FedalignError` if one has strangers."""
    found = list(dict.fromkeys(frozenset(one) for one in wanted))
    for one in found:
        if not one <= game.everyone:
            raise FedalignError(f"{type(method).__name__} asks for a coalition with {sorted(one - game.everyone)}")
    return found
