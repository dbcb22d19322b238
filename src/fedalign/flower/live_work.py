"""How much clients train in a round, for the record: known as soon as they have reported their sample counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from fedalign.flower.members import Members
from fedalign.training.optimizer import LocalOptimizer


class LiveWork(Sequence[int]):
    """The samples, passes included, that each client trains on in a round, as its count stands when it is asked for.

    >>> from fedalign import LocalSGD
    >>> from fedalign.flower.roster_file import Entry
    >>> members = Members([Entry("aa", "site-1", True)], free_cap=1.0)
    >>> work = LiveWork(members, LocalSGD(lr=0.1, epochs=5))
    >>> members.report(0, 120)
    >>> work[0]
    600
    """

    def __init__(self, members: Members, local: LocalOptimizer) -> None:
        self._members, self._local = members, local

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            return [self[k] for k in range(len(self))[place]]
        return self._local.samples_for(self._members.samples(range(len(self))[place]))

    def __len__(self) -> int:
        return len(self._members)
