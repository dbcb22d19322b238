"""Rules that give every client a weight, priority clients included, by what the priority clients measure.

The rounds are in :mod:`fedalign.protocol.weighing`.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fedalign.rules.rule import Broadcast, Measure, Offer, Rule, Selection

if TYPE_CHECKING:
    from fedalign.protocol.messages import Request
    from fedalign.protocol.trial import Trial


@dataclass(frozen=True)
class Weighed:
    """How much each client's update counts, and why.

    Weights are normalised, so they need not sum to 1; a client without one has none. ``reasons`` are those of free
    clients. ``memory`` is what the rule wants to know in the next round, in values that JSON can hold.

    >>> Weighed({0: 0.7, 3: 0.3}, reasons={3: "weight 0.3"}).weights[3]
    0.3
    """

    weights: Mapping[int, float]
    reasons: Mapping[int, str] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)


class WeighingRule(Rule):
    """A rule that weighs all clients of a round. Subclass it and define :meth:`weigh`.

    In the rules of :class:`~fedalign.Rule` the priority clients are always in the aggregate. Here their weights are the
    rule's as well, which the literature's methods for one target client need. During warm-up, the aggregate is
    FedAvg's on the priority clients. Every free client that is invited trains.

    >>> from fedalign.protocol.roster import Roster
    >>> from fedalign.testing import MadeUpClients, play
    >>> class Half(WeighingRule):
    ...     def weigh(self, trial):
    ...         losses = yield from trial.losses([trial.models[k] for k in trial.clients])
    ...         ranked = [k for _, k in sorted(zip(losses, trial.clients))]
    ...         return Weighed({k: 1.0 for k in ranked[: len(ranked) // 2]})
    >>> clients = MadeUpClients(Roster(("a", "b"), (True, False), (5, 5)), {0: 1.0, 1: 1.0}, {0: 3.0, 1: 9.0})
    >>> play(Half(), clients).model
    3.0
    """

    algorithm: ClassVar[str] = "weighing"
    needs_updates = True
    evaluates = True

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Return True: what the update does decides, not what the client reports."""
        return True

    def select(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> Selection:
        """Say which free clients may be weighed at all: those whose update is not zero."""
        return Selection(
            tuple(k for k, offer in offers.items() if offer.length > 0),
            reasons={k: "its update is zero" for k, offer in offers.items() if not offer.length > 0},
        )

    @abc.abstractmethod
    def weigh(self, trial: Trial) -> Generator[Request, Any, Weighed]:
        """Weigh the clients of a round.

        ``trial`` has their models and lets the priority clients measure any mean of them
        (``losses = yield from trial.losses(models)``). The result may depend on the trial alone.
        """
