"""The two ways a run can end early: bad input, and training that diverged."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class FedalignError(ValueError):
    """Bad input. The message is one sentence that names the value and what would be right."""


class DivergedError(RuntimeError):
    """Training left the finite numbers. ``round`` and ``clients`` say when and at whom, ``history`` what was before."""

    history: Any = None

    def __init__(self, message: str, round: int, clients: tuple[str, ...]) -> None:
        super().__init__(message)
        self.round = round
        self.clients = clients

    @classmethod
    def at(cls, round: int, names: Sequence[str], what: str) -> DivergedError:
        """Say in which round, at which clients, what went wrong, and what may help."""
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return cls(
            f"training diverged in round {round} at client(s) {shown}: {what}; try a smaller lr, or clip",
            round,
            tuple(names),
        )

    def __reduce__(self) -> tuple[type[DivergedError], tuple[str, int, tuple[str, ...]]]:
        return DivergedError, (str(self), self.round, self.clients)  # it travels between processes


class FederationWarning(UserWarning):
    """Something allowed but worth saying, as a federation in which everybody is a priority client."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Give the end of an error message about an unknown name: what it was close to, or what there is.

    >>> nearest("epsilom", ["epsilon", "rounds"])
    "did you mean 'epsilon'?"
    >>> nearest("xyz", ["epsilon", "rounds"])
    'known: epsilon, rounds'
    """
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(options)}" if options else "there is none to set"
