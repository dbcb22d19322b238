"""Who takes part in a round over Flower: the clients that the participation pattern draws and that are connected."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fedalign.flower.members import Members
from fedalign.protocol.messages import Present, WhoIsThere
from fedalign.training.participation import Participation, draw_for


class Attendance:
    """Draws the clients of a round. The quorum is one of the priority clients that were drawn.

    >>> from fedalign.flower.roster_file import Entry
    >>> from fedalign import Full
    >>> members = Members([Entry("aa", "site-1", True), Entry("bb", "site-2")], free_cap=1.0)
    >>> Attendance(Full(), members, seed=0).present(WhoIsThere(0), online={0}).reachable
    (True, False)
    """

    def __init__(self, participation: Participation, members: Members, seed: int) -> None:
        self._participation, self._members, self._seed = participation, members, seed
        self._drawn: tuple[int, ...] | None = None

    def present(self, request: WhoIsThere, online: Collection[int]) -> Present | None:
        """Return the clients that train in a round, or those that evaluate; None: those that train evaluate, too."""
        roster = self._members.roster()
        drawn = draw_for(self._participation, request.purpose, request.round, roster, self._seed)
        if drawn is None:
            return None
        if request.purpose == "train":
            self._drawn = tuple(k for k, here in enumerate(drawn.reachable) if here and roster.priority[k])
        return Present(roster, tuple(here and k in online for k, here in enumerate(drawn.reachable)), drawn.draws)

    @property
    def nobody(self) -> bool:
        """Whether no priority client was drawn for this round, so that there is nothing to wait for."""
        return self._drawn == ()

    def weight(self, clients: Iterable[int]) -> float:
        """Return the fraction of the weight of this round's priority clients that these clients have."""
        if self._drawn is None:
            return self._members.weight(clients)
        whole = self._members.weight(self._drawn)
        return self._members.weight(set(clients) & set(self._drawn)) / whole if whole else 1.0

    def missing(self, present: Iterable[int]) -> list[str]:
        """Name the priority clients of this round that are not among those present."""
        drawn = self._drawn
        missing = self._members.missing(present)
        return missing if drawn is None else [name for name in missing if name in map(self._members.name, drawn)]
