"""The clients of a federation over Flower: the roster file's entries, and the sample counts that clients report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fedalign.errors import FedalignError
from fedalign.flower.roster_file import Entry
from fedalign.protocol.roster import Roster


class Members:
    """The clients by number. Sample counts become known as clients report them; until then a client has no weight.

    A client keeps its number when the roster is edited: new ones come last, and a removed one has no role any more.

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
        self._most: dict[int, int] = {}
        self._removed: set[int] = set()
        self._names: tuple[str, ...] | None = None  # None: to be made again
        self.keep_models: set[int] = set()  #: the clients whose owners keep delivered models
        self.personal: set[int] = set()  #: the clients whose owners want personal models

    def edit(self, entries: Sequence[Entry]) -> None:
        """Take over the entries of an edited roster; clients that are not among them are removed.

        Raises :class:`FedalignError`, and changes nothing, if no priority client is left.
        """
        if not any(entry.priority for entry in entries):
            raise FedalignError("no client of the roster is a priority client; at least one is needed")
        for entry in entries:
            self.add(entry)
        self._removed = set(self._numbers.values()) - {self._numbers[entry.key] for entry in entries}
        self._names = None
        for k in self._reported:
            self.report(k, self._reported[k], self._tests[k], self._most[k])  # the cap may be another one

    def add(self, entry: Entry) -> None:
        """Add a client, or change the entry of a known one."""
        k = self._numbers.setdefault(entry.key, len(self._entries))
        self._entries[k : k + 1] = [entry]
        self._removed.discard(k)
        self._names = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The clients' entries by number, those of removed clients included."""
        return tuple(self._entries)

    def is_removed(self, k: int) -> bool:
        """Say whether the roster no longer has a client."""
        return k in self._removed

    def name(self, k: int) -> str:
        """Return the name of a client in the roster, with its key beside it if another one has that name."""
        return self._unique_names()[k]

    def is_priority(self, k: int) -> bool:
        """Say whether the roster makes a client a priority client."""
        return self._entries[k].priority and k not in self._removed

    def may_have_model(self, k: int) -> bool | None:
        """Say whether the roster lets a client have the final model; None if it does not say."""
        return self._entries[k].model

    def number(self, entry: Entry) -> int | None:
        """Return the number of a roster entry; None if it is not known, or was removed."""
        k = self._numbers.get(entry.key)
        return None if k in self._removed else k

    def has_reported(self, k: int) -> bool:
        """Say whether a client's sample count is known."""
        return k in self._counts

    def report(self, k: int, samples: int, tests: int = 0, counted: int | None = None) -> None:
        """Note how many training and test samples a client says it has; the roster file may cap the first.

        ``counted`` says how many of them count at most.
        """
        self._reported[k], self._tests[k] = samples, tests
        self._most[k] = samples if counted is None else counted
        cap = self._entries[k].samples
        self._counts[k] = self._most[k] if cap is None else min(self._most[k], cap)

    def forget(self, k: int) -> None:
        """Forget what a client reported, because it does not hold any more."""
        for of in (self._counts, self._reported, self._tests, self._most):
            of.pop(k, None)

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
        everyone = range(len(self._entries))
        return Roster(
            self._unique_names(),
            tuple(map(self.is_priority, everyone)),
            tuple(0 if k in self._removed else self._counts.get(k, 0) for k in everyone),
            self._free_cap,
            self._free_total,
        )

    def missing(self, present: Iterable[int]) -> list[str]:
        """Name the priority clients that are not among those present."""
        here = set(present)
        return [self.name(k) for k in range(len(self)) if self.is_priority(k) and k not in here]

    def weight(self, clients: Iterable[int]) -> float:
        """Return the fraction of the priority clients' weight that these clients have.

        Weights are known when all priority clients have reported. Until then it is the fraction of their number.
        """
        some = {k for k in clients if self.is_priority(k)}
        everyone = {k for k in range(len(self)) if self.is_priority(k)}
        if not everyone <= self._counts.keys():
            return len(some) / len(everyone)
        return float(sum(self.roster().p[k] for k in some))

    def _unique_names(self) -> tuple[str, ...]:
        """Return all names. Of several clients with the same one, the first that is not removed keeps it.

        The others have the start of their key beside it, or the whole key: strangers can make keys that begin alike.
        """
        if self._names is None:
            owner: dict[str, int] = {}
            for k in sorted(range(len(self._entries)), key=lambda k: k in self._removed):
                entry = self._entries[k]
                choices = (entry.name, f"{entry.name} ({entry.key[:8]})", f"{entry.name} ({entry.key})")
                owner[next((name for name in choices if name not in owner), choices[-1])] = k
            self._names = tuple(sorted(owner, key=owner.__getitem__))
        return self._names
