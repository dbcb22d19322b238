"""Progress where there is no terminal: a plain line on the standard error stream every so often."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_OFTEN, _SELDOM = 10.0, 60.0  # seconds between lines, in the first minute and later


class PlainLines:
    """Prints a line at most every 10 seconds, after a minute every 60, so that a log says how far a run is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock()

    def show(self, done: int, total: int, text: Callable[[], str], first: int = 0) -> None:
        """Print how far it is if a line is due; ``first`` is where it began, to estimate the time that is left."""
        now = self._clock()
        if now - self._last < (_OFTEN if now - self._began < 60 else _SELDOM):
            return
        self._last, elapsed = now, now - self._began
        left = f", about {duration(elapsed / (done - first) * (total - done))} left" if done > first else ""
        sys.stderr.write(f"{text()}; {duration(elapsed)}{left}\n")
        sys.stderr.flush()


def duration(seconds: float) -> str:
    """Write a time as minutes and seconds, or with hours.

    >>> duration(75), duration(7265)
    ('1:15', '2:01:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
