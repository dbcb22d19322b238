"""Participation patterns: which clients are reachable in a round.

A draw depends only on (seed, round, client), so a resumed run reaches the same clients.
"""

from __future__ import annotations

import abc
import csv
import math
import numbers
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from fedalign.errors import FedalignError
from fedalign.protocol.roster import Roster
from fedalign.training.randomness import Purpose, permutation, uniforms

_ROUND = re.compile("[0-9]{1,9}")


@dataclass(frozen=True)
class Presence:
    """The reachable clients of one round and, under Theorem 2, how often each priority client was drawn."""

    reachable: tuple[bool, ...]
    draws: dict[int, int] | None = None


class Participation(abc.ABC):
    """A pattern of participation. Subclass it and define :meth:`draw`."""

    @abc.abstractmethod
    def draw(self, round: int, roster: Roster, seed: int) -> Presence:
        """Return the clients that are reachable in this round."""

    def draw_evaluators(self, round: int, roster: Roster, seed: int) -> Presence | None:
        """Return the clients that may evaluate candidates in this round, for rules that let priority clients choose.

        None means those that take part. If the server samples the clients that train, it draws the evaluators
        separately: clients that have just trained favour their own data, and the data of the others would not count.
        """
        if hasattr(self, "jury"):
            name = type(self).__name__
            warnings.warn(f"{name}.jury is called draw_evaluators now", DeprecationWarning, stacklevel=2)
            drawn: Presence | None = self.jury(round, roster, seed)
            return drawn
        return None

    def check(self, roster: Roster, rounds: int) -> None:
        """Raise :class:`FedalignError`, before any training, if the pattern does not fit this roster."""
        return


def draw_for(
    participation: Participation, purpose: Literal["train", "evaluate"], round: int, roster: Roster, seed: int
) -> Presence | None:
    """Draw the clients that train in a round, or those that evaluate; None: no evaluators of their own.

    Raises :class:`FedalignError` if a pattern of the user's own returns something else than a :class:`Presence` with an
    entry for each client.
    """
    draw = participation.draw if purpose == "train" else participation.draw_evaluators
    drawn = draw(round, roster, seed)
    if drawn is None:
        return None
    if not isinstance(drawn, Presence) or len(drawn.reachable) != len(roster):
        name = type(participation).__name__
        raise FedalignError(f"{name} must return a fedalign.Presence with an entry for each of {len(roster)} clients")
    return Presence(tuple(bool(here) for here in drawn.reachable), drawn.draws)


@dataclass(frozen=True)
class Full(Participation):
    """Full participation: every client is reachable in every round."""

    def draw(self, round: int, roster: Roster, seed: int) -> Presence:
        """Return all clients as reachable."""
        return Presence((True,) * len(roster))


@dataclass(frozen=True)
class Uniform(Participation):
    """A fraction of all clients, priority and free, is drawn without replacement in every round."""

    fraction: float

    def __post_init__(self) -> None:
        if not isinstance(self.fraction, numbers.Real) or not 0 < self.fraction <= 1:
            raise FedalignError(f"fraction must be in (0, 1], not {self.fraction}")

    def draw(self, round: int, roster: Roster, seed: int) -> Presence:
        """Draw ``round(fraction · N)`` clients, at least one."""
        return self._drawn(roster, seed, Purpose.PARTICIPATION, round)

    def draw_evaluators(self, round: int, roster: Roster, seed: int) -> Presence:
        """Draw as many clients, independently of :meth:`draw`."""
        return self._drawn(roster, seed, Purpose.EVALUATORS, round)

    def _drawn(self, roster: Roster, *words: int) -> Presence:
        count = max(1, math.floor(self.fraction * len(roster) + 0.5))
        chosen = set(permutation(len(roster), *words)[:count].tolist())
        return Presence(tuple(k in chosen for k in range(len(roster))))


@dataclass(frozen=True)
class Replacement(Participation):
    """The sampling of Theorem 2: K = ``draws`` draws from the priority clients, with probabilities ``p_k``.

    A priority client that is drawn c times has the weight ``c/K`` in the aggregate, in place of its ``p_k``. All free
    clients are reachable.
    """

    draws: int

    def __post_init__(self) -> None:
        if isinstance(self.draws, bool) or not isinstance(self.draws, int) or self.draws < 1:
            raise FedalignError(f"draws must be a whole number of at least 1, not {self.draws!r}")

    def draw(self, round: int, roster: Roster, seed: int) -> Presence:
        """Draw priority clients with replacement, and count the draws of each."""
        return self._drawn(roster, seed, Purpose.PARTICIPATION, round)

    def draw_evaluators(self, round: int, roster: Roster, seed: int) -> Presence:
        """Draw in the same way, independently of :meth:`draw`."""
        return self._drawn(roster, seed, Purpose.EVALUATORS, round)

    def _drawn(self, roster: Roster, *words: int) -> Presence:
        p = np.where(roster.priority, roster.p, 0.0)
        u = uniforms(*words, np.arange(self.draws))
        # Dividing by the sum keeps a draw just below 1 within the last priority client.
        cumulative = np.cumsum(p) / np.sum(p)
        drawn = np.searchsorted(cumulative, u, side="right")
        drawn = np.minimum(drawn, int(np.flatnonzero(p)[-1]))
        counts = {int(k): int(c) for k, c in zip(*np.unique(drawn, return_counts=True), strict=True)}
        reachable = tuple(k in counts or not is_priority for k, is_priority in enumerate(roster.priority))
        return Presence(reachable, counts)


@dataclass(frozen=True)
class Bernoulli(Participation):
    """Priority clients are always reachable; each free client is, independently, with probability ``p``."""

    p: float

    def __post_init__(self) -> None:
        if not isinstance(self.p, numbers.Real) or not 0 <= self.p <= 1:
            raise FedalignError(f"p must be in [0, 1], not {self.p}")

    def draw(self, round: int, roster: Roster, seed: int) -> Presence:
        """Draw each free client independently."""
        u = uniforms(seed, Purpose.PARTICIPATION, round, np.arange(len(roster)))
        return Presence(tuple(bool(f or u[k] < self.p) for k, f in enumerate(roster.priority)))


@dataclass(frozen=True)
class Trace(Participation):
    """A CSV file with columns ``round,client`` lists the reachable clients of each round, by name or number from 0.

    With ``repeat``, the trace starts again after its last round, like a day. Without it, rounds after the end of the
    trace have no reachable client and are skipped.
    """

    path: str | Path
    repeat: bool = False
    rows: dict[int, frozenset[str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _read_trace(Path(self.path)))

    def draw(self, round: int, roster: Roster, seed: int) -> Presence:
        """Return the clients that the trace lists for this round."""
        t = round % (max(self.rows) + 1) if self.repeat else round
        there = self.rows.get(t, frozenset())
        named = set(roster.names)
        return Presence(
            tuple(name in there or (str(k) in there and str(k) not in named) for k, name in enumerate(roster.names))
        )

    def check(self, roster: Roster, rounds: int) -> None:
        """Raise :class:`FedalignError` if the trace names a client that is not in the roster."""
        known = set(roster.names) | {str(k) for k in range(len(roster))}
        for round, there in sorted(self.rows.items()):
            for client in sorted(there - known):
                raise FedalignError(
                    f"trace {self.path}: round {round} names client {client!r}, "
                    f"but the federation has clients 0 to {len(roster) - 1}"
                )


def _read_trace(path: Path) -> dict[int, frozenset[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [cell.strip() for cell in next(reader, [])]
            if header != ["round", "client"]:
                raise FedalignError(f"trace {path}: the first line must be 'round,client', not {','.join(header)!r}")
            rows: dict[int, set[str]] = {}
            for row in reader:
                if not row:
                    continue
                if len(row) != 2 or not _ROUND.fullmatch(row[0].strip()) or not row[1].strip():
                    raise FedalignError(
                        f"trace {path}, line {reader.line_num}: {','.join(row)!r} is not 'round,client' (round from 0)"
                    )
                rows.setdefault(int(row[0]), set()).add(row[1].strip())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FedalignError(f"cannot read trace {path}: {reason}") from error
    if not rows:
        raise FedalignError(f"trace {path} names no client in any round")
    return {round: frozenset(there) for round, there in rows.items()}
