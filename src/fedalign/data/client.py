"""A client of a federation, and checks of what is given for all clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedalign.data.rows import Rows
from fedalign.errors import FedalignError
from fedalign.rules.rule import Split


@dataclass(frozen=True, eq=False)
class Client:
    """A client: its name, its role, and which rows of the pool are its training, held-out and test samples."""

    name: str
    priority: bool
    train: Rows
    heldout: Rows
    test: Rows

    def rows(self, split: Split) -> Rows:
        """Return the rows of one split: ``"train"``, ``"heldout"`` or ``"test"``."""
        return {"train": self.train, "heldout": self.heldout, "test": self.test}[split]


def names_of(names: Sequence[str] | None, count: int) -> list[str]:
    """Return the clients' names; those that have none are called by their number."""
    return [str(name) for name in names] if names is not None else [str(k) for k in range(count)]


def check_counts(clients: int, **given: Sequence[Any] | None) -> None:
    """Refuse lists that do not have one entry for each client.

    >>> check_counts(3, names=["a", "b"])
    Traceback (most recent call last):
    fedalign.errors.FedalignError: 2 names for 3 clients; there must be one per client
    """
    for what, entries in given.items():
        if entries is not None and len(entries) != clients:
            noun = what.replace("heldout", "held-out").replace("_", " ")
            raise FedalignError(f"{len(entries)} {noun} for {clients} clients; there must be one per client")
