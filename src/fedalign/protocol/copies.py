"""Updates that are copies: what the priority clients or the server had already is no contribution.

A free client whose update has the direction of a priority client's, or of the server's last step, brings nothing new:
it is a *copy*, and worth 0. Of free clients whose updates are copies of each other nobody can tell who was first, so
they count once and share that value.

Updates of models with few parameters are alike by nature. So copies must also be far more alike than any two priority
clients' updates are in the round, which shows how alike honest ones can be.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from fedalign.protocol.messages import Cosines, Model, Request
from fedalign.protocol.roster import Roster
from fedalign.protocol.round_log import RoundLog

_SERVER = -1  # the client's number that stands for the server's last step
_CLOSER = 100.0  # by this factor copies are closer, in 1 − cosine, than the closest two priority clients
_SAME = 1 - 1e-6  # a cosine that only the same update has, rounding aside: two priority clients may have the same data


@dataclass(frozen=True)
class Copies:
    """The copies among the free clients of a round.

    ``of_trusted`` says whose update each copy repeats. ``first`` maps every other client to the one with the lowest
    number among those that sent the same.

    >>> copies = Copies({7: "a priority client"}, {3: 3, 4: 3, 5: 5})
    >>> sorted(copies.counted({3, 4, 5, 7}, {3: 0.1, 4: 0.2, 5: 0.1, 7: 0.1}))
    [4, 5]
    """

    of_trusted: Mapping[int, str] = field(default_factory=dict)
    first: Mapping[int, int] = field(default_factory=dict)

    def counted(self, clients: Collection[int], weights: Mapping[int, float]) -> frozenset[int]:
        """Return the clients whose updates count in a coalition: of equal updates, the one with the largest weight."""
        heaviest: dict[int, int] = {}
        for k in sorted(clients):
            if k not in self.of_trusted:
                group = self.first.get(k, k)
                if group not in heaviest or weights[k] > weights[heaviest[group]]:
                    heaviest[group] = k
        return frozenset(heaviest.values())

    def group(self, client: int) -> list[int]:
        """Return the clients that sent the same update as this one, itself included.

        >>> Copies({}, {3: 3, 4: 3, 5: 5}).group(3)
        [3, 4]
        """
        return [k for k, first in self.first.items() if first == self.first[client]]

    def words(self, client: int, roster: Roster) -> str:
        """Say what a client's update is a copy of; empty if it is none."""
        if client in self.of_trusted:
            return self.of_trusted[client]
        return ", ".join(roster.names[k] for k in self.group(client) if k != client)


def find_copies(
    log: RoundLog, free: Collection[int], least: float, previous: Model | None
) -> Generator[Request, Any, Copies]:
    """Compare updates; those whose cosine is at least ``least``, and far above priority clients' own, are copies.

    ``previous`` is the model of the round before, if there was one.
    """
    if not free:
        return Copies()
    clients = tuple(sorted([*log.trained, *free]))
    cosines: Mapping[tuple[int, int], float] = yield Cosines(clients, previous)
    honest = max((cosines[min(pair), max(pair)] for pair in combinations(log.trained, 2)), default=-1.0)

    limit = max(least, min(_SAME, 1 - (1 - honest) / _CLOSER))

    def alike(i: int, j: int) -> bool:
        return cosines.get((min(i, j), max(i, j)), -1.0) >= limit

    found: dict[int, str] = {}
    first: dict[int, int] = {}
    for k in sorted(free):
        # An update of length 0 is the received model, which is no contribution either.
        if k in log.similarities and not log.similarities[k].length > 0:
            found[k] = "the received model"
        elif alike(_SERVER, k):
            found[k] = "the server's last step"
        elif repeated := [j for j in log.trained if alike(j, k)]:
            found[k] = log.roster.names[max(repeated, key=lambda j: cosines[min(j, k), max(j, k)])]
        else:
            same = [j for j in first if alike(j, k)]
            first[k] = first[same[0]] if same else k
    return Copies(found, first)
