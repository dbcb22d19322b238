"""AutoALIGN's rule: the candidate sets of free clients, and how the priority clients choose among them.

The rounds are in :mod:`fedalign.protocol.autoalign`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from fedalign.errors import FedalignError
from fedalign.rules.align import Align
from fedalign.rules.rule import Broadcast, MatchOn, Measure, Offer, Rule, Selection


@dataclass(frozen=True)
class AutoAlign(Rule):
    """AutoALIGN: FedALIGN whose ε the priority clients choose every round.

    Free clients offer with the widest ε. The server aggregates several *candidates*: the sets of clients that FedALIGN
    would admit with one ε after another. These are the ε of a ``ladder``; without one, they are those that admit the
    best aligned 1, 2, 3, 4, 6, 8, 12, … clients. Priority clients measure the candidates on held-out data and are
    served the one with the lowest weighted loss, the smaller set on a tie. The empty set is always a candidate, so no
    round's choice is worse on that data than FedAvg on the priority clients. A ladder of one ε is FedALIGN with it.

    The next round trains on from another model, the *training model*. It contains the updates of all free clients
    whose cosine with the priority clients' mean update is at least ``cosine``: what is best to serve after a round is
    seldom best to train on from. With a ladder, or with ``cosine=None``, the next round trains the chosen model.

    With ``fallback``, FedAvg on the priority clients is trained as well. They are served that *priority-only model*
    while the choices are worse (see :mod:`fedalign.protocol.autoalign`). With ``credit``, as in version 0.1, earlier
    good rounds make up for bad ones, and accuracy alone is compared. With ``calibrated``, models are compared by their
    losses at the best temperature (see :mod:`fedalign.protocol.calibration`), so that none is preferred for being less
    confident.

    >>> rule, F = AutoAlign(), Broadcast(round=0, loss=1.0, epsilon=math.inf)
    >>> offers = {k: Offer(Measure(loss, None, 1)) for k, loss in ((4, 1.1), (7, 1.9), (9, 0.95))}
    >>> [candidate.clients for candidate in rule.candidates(offers, F)]
    [(), (9,), (4, 9), (4, 7, 9)]
    >>> [candidate.clients for candidate in AutoAlign(ladder=(0, 0.2, 1)).candidates(offers, F)]
    [(), (4, 9), (4, 7, 9)]
    """

    algorithm: ClassVar[str] = "autoalign"
    evaluates = True
    ladder: tuple[float, ...] | None = None
    on: Literal["loss", "accuracy"] = "loss"
    match_on: MatchOn | None = None
    fallback: bool = True
    credit: bool = False
    calibrated: bool = False
    cosine: float | None = -0.1
    needs_accuracy: bool = field(init=False, repr=False, compare=False)
    needs_updates: bool = field(init=False, repr=False, compare=False)
    _align: Align = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        widest = math.inf
        if self.ladder is not None:
            try:
                steps = sorted({float(epsilon) for epsilon in self.ladder})
            except (TypeError, ValueError):
                steps = []
            if not steps or any(math.isnan(epsilon) or epsilon < 0 for epsilon in steps):
                raise FedalignError(f"AutoAlign's ladder must hold at least one ε, none negative, not {self.ladder!r}")
            object.__setattr__(self, "ladder", tuple(steps))
            widest = steps[-1]
        if self.cosine is not None:
            number = isinstance(self.cosine, numbers.Real) and not isinstance(self.cosine, bool)
            if not number or not -1 <= self.cosine <= 1:
                raise FedalignError(f"AutoAlign's cosine must be from -1 to 1, not {self.cosine!r}")
        object.__setattr__(self, "needs_updates", self.has_training_model or type(self).needs_updates)
        object.__setattr__(self, "_align", Align(widest, self.on, self.match_on))
        object.__setattr__(self, "needs_accuracy", self.on == "accuracy")

    @property
    def is_fedalign(self) -> bool:
        """Whether the ladder has one ε, so that there is nothing to choose."""
        return self.ladder is not None and len(self.ladder) == 1

    @property
    def has_training_model(self) -> bool:
        """Whether the next round trains another model than the one that is served."""
        return self.ladder is None and self.cosine is not None

    def epsilon_at(self, round: int, rounds: int) -> float:
        """Return the widest ε, with which free clients decide whether to offer."""
        return self._align.epsilon_at(round, rounds)

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Offer as FedALIGN's clients do, with the widest ε."""
        return self._align.offers(own, broadcast)

    def select(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> Selection:
        """Admit as FedALIGN does, with the broadcast's ε: one candidate."""
        return replace(self._align.select(offers, broadcast), epsilon=broadcast.epsilon)

    def why(self, own: Measure, broadcast: Broadcast, admitted: bool) -> str:
        """Spell out FedALIGN's inequality for the ε that was chosen."""
        return self._align.why(own, broadcast, admitted)

    def candidates(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> list[Selection]:
        """Return one candidate for each distinct set of clients, smaller sets first, with the smallest ε that gives it.

        A subclass may return other candidates; the empty set should be among them.
        """
        # Of several candidates, ε = 0 stands for nobody, even if some client's gap is 0.
        found: dict[tuple[int, ...], Selection] = {} if self.is_fedalign else {(): Selection(epsilon=0.0)}
        for epsilon in self._cuts(offers, broadcast) if self.ladder is None else self.ladder:
            if epsilon == 0 and self.ladder is not None and not self.is_fedalign:
                continue
            candidate = self.select(offers, replace(broadcast, epsilon=epsilon))
            found.setdefault(candidate.clients, candidate)
        return sorted(found.values(), key=lambda candidate: len(candidate.clients))

    def choose(
        self, candidates: Sequence[Selection], measures: Sequence[Mapping[int, Measure]], p: Mapping[int, float]
    ) -> int:
        """Return the index of the candidate to serve: the lowest ``p_k``-weighted loss; on a tie, the smaller set.

        ``measures`` holds, for each candidate, the evaluators' measures of its aggregate on their held-out data.
        """
        losses = [math.fsum(p[k] * measure.loss for k, measure in of_one.items()) for of_one in measures]
        return min(range(len(candidates)), key=lambda i: (losses[i], len(candidates[i].clients)))

    def training_set(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> Mapping[int, str] | None:
        """Return the free clients of the training model, each with the reason; None: train the chosen model.

        An update of length 0 has no direction and is left out.
        """
        if not self.has_training_model:
            return None
        assert self.cosine is not None
        cosines = {k: offer.cosine for k, offer in offers.items() if offer.length > 0}
        # Kept from version 0.1: users script against reasons.
        return {
            k: f"in the base: cosine {c:.3g}, at least {self.cosine:g}" for k, c in cosines.items() if c >= self.cosine
        }

    def _cuts(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> list[float]:
        """Return the ε that admit the best aligned clients, for growing numbers of clients."""
        found = (self._align.gap(offer.measure, broadcast) for offer in offers.values())
        gaps = sorted(gap for gap in found if not math.isnan(gap))
        return [gaps[size - 1] for size in sizes(len(gaps))]


def sizes(most: int) -> list[int]:
    """Return set sizes in steps of a third or so: 1, 2, 3, 4, 6, 8, 12, 16, …, and all.

    >>> sizes(20)
    [1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    powers = (2**i for i in range(most.bit_length()))
    steps = sorted({size for power in powers for size in (power, power * 3 // 2)} | {most})
    return [size for size in steps if 0 < size <= most]
