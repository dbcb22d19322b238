"""Leaves free clients out for some rounds if they do not answer in time again and again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_MISSES = 2  # in a row; after that a client is benched
_LONGEST = 64  # rounds


@dataclass(frozen=True)
class Benched:
    """A client that is left out before the round ``until``, for ``rounds`` rounds in all, and why."""

    until: int
    rounds: int
    reason: str

    def reason_in(self, round: int) -> str:
        """Say why the client is absent in a round, for the record."""
        left = self.until - round
        return f"benched for {left} more {'round' if left == 1 else 'rounds'}: {self.reason}"


class Bench:
    """Counts the rounds in which a client did not answer in time. Each time it is benched for twice as long.

    A client that answers in time is trusted a little more with every round.

    >>> bench = Bench()
    >>> bench.note(0, missed={3: "no answer in 9 s"}, answered=[4])
    {}
    >>> bench.note(1, missed={3: "no answer in 9 s"}, answered=[4])
    {3: Benched(until=4, rounds=2, reason='no answer in 9 s')}
    >>> bench.at(3)[3].reason_in(3), bench.at(4)
    ('benched for 1 more round: no answer in 9 s', {})
    """

    def __init__(self) -> None:
        self._misses: dict[int, int] = {}
        self._times: dict[int, int] = {}  # that a client was benched, less the rounds in which it answered since
        self._benched: dict[int, Benched] = {}

    def note(self, round: int, missed: Mapping[int, str], answered: Iterable[int]) -> dict[int, Benched]:
        """Note which clients answered in a round and which did not, and return those that are benched now."""
        for k in answered:
            self._misses.pop(k, None)
            if k in self._times:
                self._times[k] -= 1
                if not self._times[k]:
                    del self._times[k]
        fresh = {}
        for k, reason in missed.items():
            self._misses[k] = self._misses.get(k, 0) + 1
            if self._misses[k] >= _MISSES or k in self._times:
                self._times[k] = self._times.get(k, 0) + 1
                rounds = min(_LONGEST, 2 ** self._times[k])
                fresh[k] = self._benched[k] = Benched(round + 1 + rounds, rounds, reason)
        return fresh

    def at(self, round: int) -> dict[int, Benched]:
        """Return the clients that are left out in a round; those whose time is over are forgotten."""
        self._benched = {k: one for k, one in self._benched.items() if round < one.until}
        return dict(self._benched)

    def returning(self, round: int) -> list[int]:
        """Return the clients that are asked again from this round on."""
        return [k for k, one in self._benched.items() if round >= one.until]
