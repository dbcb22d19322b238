"""How long the server waits for clients, and the clock that it goes by."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass

_PART = 0.5  # of the time that the others needed
_LEAST = 1.0  # seconds of grace in a round that takes less, unless the setting is shorter


class Timer:
    """The server's clock, which tests replace."""

    def now(self) -> float:
        """Return the seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for so many seconds; tests have a clock of their own."""
        time.sleep(seconds)


@dataclass(frozen=True)
class Patience:
    """How long clients have to answer, in seconds.

    Priority clients have ``timeout``, free clients ``free_timeout``. The server goes on earlier without those that are
    still missing, a ``grace`` time after the priority clients' quorum and ``free_part`` of the free clients answered.
    """

    timeout: float
    free_timeout: float
    free_part: float = 0.5
    grace: float = 5.0

    def limit(self, priority: bool) -> float:
        """Return how long a client has at most."""
        return self.timeout if priority else self.free_timeout

    def extra(self, waited: float, for_priority: bool = False) -> float:
        """Return the grace time, given the seconds in which enough clients answered.

        It is ``grace``, or half of the time that they took where that is longer. If free clients alone are missing it
        is no longer than they took: a straggler at most doubles a short wait. Priority clients are given all of it.

        >>> patience = Patience(600.0, 600.0, grace=5.0)
        >>> patience.extra(0.2), patience.extra(2.0), patience.extra(8.0), patience.extra(300.0)
        (1.0, 2.0, 5.0, 150.0)
        >>> patience.extra(2.0, for_priority=True)
        5.0
        """
        grace = self.grace if for_priority else min(self.grace, max(_LEAST, waited))
        return max(_PART * waited, grace)

    def enough_free(self, asked: Collection[int], answered: Set[int]) -> bool:
        """Say whether the necessary part of the free clients that were asked has answered.

        >>> patience = Patience(600.0, 600.0, free_part=0.5)
        >>> patience.enough_free([4, 5, 6], {4}), patience.enough_free([4, 5, 6], {4, 6})
        (False, True)
        """
        return len(answered & set(asked)) >= math.ceil(self.free_part * len(asked) - 1e-9)


Quorum = Callable[[Set[int]], bool]  #: says whether these priority clients are enough for a round
