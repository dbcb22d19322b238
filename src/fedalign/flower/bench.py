"""Leaves free clients out for some rounds if they do not answer in time again and again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_MISS = 16  # what a missed round adds to a client's score; a round answered in time takes 1 off
_HIGHEST = 7 * _MISS  # benched for 64 rounds then


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
    """Keeps a score of every client that missed a round, and benches those that miss another before it is 0 again.

    A miss counts 16, and a round answered in time takes 1 off, so that a client which hangs now and then cannot cost a
    round the full time again and again. The higher the score, the longer it is benched: 2 rounds, then 4, up to 64.

    >>> bench = Bench()
    >>> bench.note(0, missed={3: "no answer in 9 s"}, answered=[4])
    {}
    >>> bench.is_reliable(3), bench.is_reliable(4)
    (False, True)
    >>> bench.note(1, missed={}, answered=[3, 4])
    {}
    >>> bench.note(2, missed={3: "no answer in 9 s"}, answered=[4])
    {3: Benched(until=5, rounds=2, reason='no answer in 9 s')}
    >>> bench.at(4)[3].reason_in(4), bench.at(5)
    ('benched for 1 more round: no answer in 9 s', {})
    """

    def __init__(self) -> None:
        self._scores: dict[int, int] = {}  # of the clients whose score is above 0
        self._benched: dict[int, Benched] = {}

    def is_reliable(self, k: int) -> bool:
        """Say whether a client has answered for long enough, so that a round may wait for it."""
        return k not in self._scores

    def note(self, round: int, missed: Mapping[int, str], answered: Iterable[int]) -> dict[int, Benched]:
        """Note which clients answered in a round and which did not, and return those that are benched now."""
        for k in answered:
            if self._scores.get(k, 0) > 1:
                self._scores[k] -= 1
            else:
                self._scores.pop(k, None)
        fresh = {}
        for k, reason in missed.items():
            self._scores[k] = score = min(_HIGHEST, self._scores.get(k, 0) + _MISS)
            if score > _MISS:
                rounds = 2 ** ((score - 1) // _MISS)
                fresh[k] = self._benched[k] = Benched(round + 1 + rounds, rounds, reason)
        return fresh

    def at(self, round: int) -> dict[int, Benched]:
        """Return the clients that are left out in a round; those whose time is over are forgotten."""
        self._benched = {k: one for k, one in self._benched.items() if round < one.until}
        return dict(self._benched)

    def returning(self, round: int) -> list[int]:
        """Return the clients that are asked again from this round on."""
        return [k for k, one in self._benched.items() if round >= one.until]
