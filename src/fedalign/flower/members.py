"""The clients of a federation over Flower: the roster file's entries, and the sample counts that clients report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fedalign.flower.roster_file import Entry
from fedalign.protocol.roster import Roster


class Members:
    """The clients by number. Sample counts become known as clients report them; until then a client has no weight.

    >>> members = Members([Entry("aa", "site-1", True), Entry("bb", "site-2", samples=50)], free_cap=1.0)
    >>> members.report(0, 100)
    >>> members.report(1, 400)
    >>> members.roster().samples
    (100, 50)
    """

    def __init__(self, entries: Sequence[Entry], free_cap: float, free_total: float = math.inf) -> None:
        self._entries, self._free_cap, self._free_total = list(entries), free_cap, free_total
        self._numbers = {entry.key: k for k, entry in enumerate(entries)}
        self._counts: dict[int, int] = {}
        self._reported: dict[int, int] = {}
        self._tests: dict[int, int] = {}
        self.keep_models: set[int] = set()  #: the clients whose owners keep delivered models

    def name(self, k: int) -> str:
        """Return the name of a client in the roster."""
        return self._entries[k].name

    def is_priority(self, k: int) -> bool:
        """Say whether the roster makes a client a priority client."""
        return self._entries[k].priority

    def may_have_model(self, k: int) -> bool | None:
        """Say whether the roster lets a client have the final model; None if it does not say."""
        return self._entries[k].model

    def number(self, entry: Entry) -> int | None:
        """Return the number of a roster entry; None if it was added after the run began."""
        return self._numbers.get(entry.key)

    def has_reported(self, k: int) -> bool:
        """Say whether a client's sample count is known."""
        return k in self._counts

    def report(self, k: int, samples: int, tests: int = 0) -> None:
        """Note how many training and test samples a client says it has; the roster file may cap the first."""
        self._reported[k], cap = samples, self._entries[k].samples
        self._counts[k] = samples if cap is None else min(samples, cap)
        self._tests[k] = tests

    def samples(self, k: int) -> int:
        """Return how many training samples a client says it trains on, without a cap; 0 if it has not reported."""
        return self._reported.get(k, 0)

    def with_test(self) -> list[int]:
        """Return the clients that have reported test data."""
        return [k for k, tests in self._tests.items() if tests > 0]

    def __len__(self) -> int:
        return len(self._entries)

    def roster(self) -> Roster:
        """Return the roster as it stands now, which later reports do not change."""
        return Roster(
            tuple(entry.name for entry in self._entries),
            tuple(entry.priority for entry in self._entries),
            tuple(self._counts.get(k, 0) for k in range(len(self._entries))),
            self._free_cap,
            self._free_total,
        )

    def missing(self, present: Iterable[int]) -> list[str]:
        """Name the priority clients that are not among those present."""
        here = set(present)
        return [entry.name for k, entry in enumerate(self._entries) if entry.priority and k not in here]

    def weight(self, clients: Iterable[int]) -> float:
        """Return the fraction of the priority clients' weight that these clients have.

        Weights are known when all priority clients have reported. Until then it is the fraction of their number.
        """
        some = {k for k in clients if self.is_priority(k)}
        everyone = {k for k, entry in enumerate(self._entries) if entry.priority}
        if not everyone <= self._counts.keys():
            return len(some) / len(everyone)
        return float(sum(self.roster().p[k] for k in some))
