"""How long to pause between two looks for a message: a tenth of the time waited so far, within limits.

Flower has no way to wake a node up, so both sides look again and again. A pause that grows with the wait costs little
where the work is long, and a tenth of the time at most where it is short. The parts of a message are polled for, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from fedalign.errors import FedalignError

IDLE = "FEDALIGN_POLL"  #: the environment variable with a node's shortest pause, in seconds
_SHORTEST_IDLE = 0.2
_SHORTEST_REPLY = 0.02
_PART = 0.1  # of the time waited
_SLOW, _REST, _NEW = 0.05, 20.0, 0.3  # see SuperLinkLoad
_OBJECT, _OBJECT_AT_MOST = 0.03, 0.5  # seconds until a part of a message that has not come is asked for again


def pause_after(waited: float, shortest: float, longest: float) -> float:
    """Return the seconds to pause, given the seconds waited so far.

    >>> [pause_after(waited, shortest=0.2, longest=3.0) for waited in (0.5, 10.0, 600.0)]
    [0.2, 1.0, 3.0]
    """
    return min(longest, max(shortest, _PART * waited))


def shortest_pause(environment: str | None) -> float:
    """Read a node's shortest pause between two looks for a message; the default is 0.2 seconds.

    >>> shortest_pause("1.5")
    1.5
    """
    try:
        seconds = _SHORTEST_IDLE if not environment else float(environment)
    except ValueError:
        seconds = -1.0
    if not 0.01 <= seconds <= 60:
        raise FedalignError(f"{IDLE} must be a number of seconds from 0.01 to 60, not {environment!r}")
    return seconds


class SuperLinkLoad:
    """Tells from how long looks for a message take how long to leave a busy SuperLink alone.

    A SuperLink answers about a hundred requests in a second. Many nodes that all look five times a second would take
    up all of its time, and the requests that carry models would wait in between. So a node whose looks take more than
    50 milliseconds longer than its quickest one, in a running mean, pauses twenty times as long as they are too slow.

    >>> load = SuperLinkLoad()
    >>> [round(load.pause(took), 2) for took in (0.01, 0.05, 0.5, 0.5)]
    [0.0, 0.0, 2.11, 4.12]
    """

    def __init__(self) -> None:
        self._quickest: float | None = None
        self._usual = 0.0

    def pause(self, took: float) -> float:
        """Return the seconds to pause at least, after a look that took so many seconds."""
        if self._quickest is None:
            self._quickest = self._usual = took
        self._quickest = min(self._quickest, took)
        self._usual += _NEW * (took - self._usual)
        return _REST * max(0.0, self._usual - self._quickest - _SLOW)


class Paced:
    """Stands in for the module ``time`` in Flower's loop of a SuperNode, and shortens its fixed pauses.

    The loop sleeps 3 seconds when there was no message, and half a second while the ClientApp works on one.
    ``shortest`` is the shortest pause when there was no message. Everything else is as in ``time``.
    """

    def __init__(
        self, shortest: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._shortest, self._clock, self._sleep = shortest, clock, sleep
        self._worked: float | None = None  # when the work on the present message began
        self._idle_since = clock()
        self._looked: float | None = None  # when the present look for a message began
        self._load = SuperLinkLoad()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Sleep as long as the loop's own pause at most."""
        now = self._clock()
        if seconds < 1:  # it waits for the ClientApp's reply
            if self._worked is None:
                self._worked = now
            self._sleep(pause_after(now - self._worked, _SHORTEST_REPLY, seconds))
            return
        least = self._shortest
        if self._worked is not None:
            self._worked, self._idle_since = None, now
        elif self._looked is not None:  # nothing but a look lies between the last pause and this one
            least = max(least, self._load.pause(now - self._looked))
        self._sleep(pause_after(now - self._idle_since, least, max(seconds, self._shortest)))
        self._looked = self._clock()


def quicken_supernode() -> None:
    """Replace the fixed pauses of Flower's SuperNode in this process.

    A version of Flower whose loop is written differently keeps its own pauses.
    """
    from flwr.supernode import start_client_internal as loop

    if getattr(loop, "time", None) is time:
        setattr(loop, "time", Paced(shortest_pause(os.environ.get(IDLE))))  # noqa: B010 - mypy knows no such name


def quicken_pulls() -> None:
    """Shorten the pauses of Flower's functions that fetch the parts of a message, in this process.

    A message is announced before its parts are there: by the server to a SuperNode, and by that to the ClientApp. Who
    asks too early waits a second by Flower's defaults, then two, then four. That was most of a round. Here the first
    pause is short and each further one twice as long, so that what takes long is not asked for all the time. Flower's
    limit on the number of tries goes, because they would take less time now; its limit on the time stays.
    """
    from flwr.supercore.inflatable import inflatable_utils as parts

    shorter = {"initial_backoff": _OBJECT, "backoff_cap": _OBJECT_AT_MOST, "max_tries_per_object": None}
    for fetch in (parts.pull_objects, parts.pull_and_inflate_object_from_tree):
        defaults = fetch.__kwdefaults__ or {}
        if defaults.keys() >= shorter.keys():  # a version of Flower that is written differently keeps its own
            defaults.update(shorter)
