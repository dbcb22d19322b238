"""Compares what clients say of their data with what they said before, so that a jump of a sample count is noticed."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping

from fedalign.flower.roster_file import Entry
from fedalign.flower.run_identity import DataIdentity

log = logging.getLogger("flwr")
JUMP = 2  #: times as many samples as at first; a free client's further ones are not counted


class SampleCounts:
    """Decides how many of a client's samples count. ``data`` has what each client said first, by its key.

    >>> counts = SampleCounts({})
    >>> counts.counted(Entry("aa", "site-3"), 100), counts.counted(Entry("aa", "site-3"), 150)
    (100, 150)
    >>> counts.counted(Entry("aa", "site-3"), 90_000)
    200
    """

    def __init__(self, data: MutableMapping[str, DataIdentity]) -> None:
        self.data, self._last = data, dict[str, int]()
        self.report: Callable[..., None] = lambda event, client=None, **details: None

    def counted(self, entry: Entry, train: int, fingerprint: str = "") -> int:
        """Return how many samples count, given those that a client says it has; what changed is reported.

        A priority client's samples all count: the federation is its own.
        """
        first = self.data.setdefault(entry.key, DataIdentity(train, fingerprint))
        last = self._last.get(entry.key, first.train)
        self._last[entry.key] = train
        if fingerprint and fingerprint != first.fingerprint:
            if first.fingerprint:
                log.warning("%s has other data than before", entry.name)
                self.report("data_changed", entry.name, was=first.fingerprint, now=fingerprint)
            first.fingerprint = fingerprint
        counted = train if entry.priority else min(train, JUMP * first.train)
        if train > JUMP * first.train and train != last:
            log.warning("%s has %d training samples now, and had %d; %d count", entry.name, train, first.train, counted)
            self.report("samples_jumped", entry.name, was=first.train, now=train, counted=counted)
        elif train != last:
            self.report("samples_changed", entry.name, was=last, now=train)
        return counted
