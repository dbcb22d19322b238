"""Who is there: the roster's clients, their nodes and sample counts, as they come and go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedalign.flower.roster_file import Entry
from fedalign.protocol.roster import Roster
from fedalign.training.participation import Participation, Presence


@dataclass(frozen=True)
class LiveRoster(Roster):
    """A roster whose sample counts become known as clients report them; until then a client isn't invited."""

    counts: dict[int, int] = field(default_factory=dict, compare=False)
    caps: Mapping[int, int] = field(default_factory=dict, compare=False)
    free_cap: float = 1.0

    @classmethod
    def of(cls, entries: Sequence[Entry], free_cap: float) -> LiveRoster:
        """Begin with the roster file's clients."""
        return cls(
            tuple(entry.name for entry in entries),
            tuple(entry.priority for entry in entries),
            (1,) * len(entries),
            {},
            {k: entry.samples for k, entry in enumerate(entries) if entry.samples is not None},
            free_cap,
        )

    @property
    def p(self) -> npt.NDArray[np.float64]:
        """The weights of those that have reported; a free client's is at most ``free_cap``."""
        samples = np.array(
            [min(self.counts.get(k, 0), self.caps.get(k, self.counts.get(k, 0))) for k in range(len(self))], np.float64
        )
        priority = np.asarray(self.priority, bool)
        total = samples[priority].sum()
        weights: npt.NDArray[np.float64] = samples / total if total else samples * 0.0
        return np.where(priority, weights, np.minimum(weights, self.free_cap))


@dataclass(frozen=True)
class Online(Participation):
    """Reachable is who is connected now and has reported its sample counts."""

    who: Callable[[], set[int]]

    def draw(self, round: int, roster: Roster, seed: int) -> Presence:
        """Ask who is there."""
        there = self.who()
        return Presence(tuple(k in there for k in range(len(roster))))
