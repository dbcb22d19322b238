"""The rules that FedALIGN is compared with first: priority clients only, everybody, and no federation at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fedalign.rules.rule import Broadcast, Measure, Offer, Rule, Selection


class PriorityOnly(Rule):
    """FedAvg on the priority clients: free clients are not invited.

    >>> PriorityOnly().invites_free
    False
    """

    invites_free = False

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Return False: no free client takes part."""
        return False

    def select(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> Selection:
        """Admit no free client."""
        return Selection()


class Everyone(Rule):
    """FedAvg on everybody, with weights in proportion to sample counts (after the run's warm-up, if it has one).

    >>> Everyone().select({3: Offer(Measure(9.0, None, 5))}, Broadcast(round=0, loss=1.0)).clients
    (3,)
    """

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Return True: every free client takes part."""
        return True

    def select(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> Selection:
        """Admit every free client that offers."""
        return Selection(tuple(offers))

    def why(self, own: Measure, broadcast: Broadcast, admitted: bool) -> str:
        """State that this rule admits everybody."""
        return "everyone is admitted"


class Alone:
    """In place of a rule: every client trains by itself, with no server (the `local` arm).

    >>> Alone.algorithm
    'local-only'
    """

    algorithm: ClassVar[str] = "local-only"
