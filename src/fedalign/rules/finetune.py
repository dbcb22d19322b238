"""FedAvg on all clients, then fine-tuned on the priority clients."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass

from fedalign.errors import FedalignError
from fedalign.rules.rule import Broadcast, MatchOn, Measure, Offer, Rule, Selection


@dataclass(frozen=True)
class FineTuned(Rule):
    """FedAvg on everybody, and in the last part of the rounds on the priority clients alone.

    The usual baseline for one target, for instance "fine-tuning" in Jiang, Zhang and Koyejo (2024, arXiv:2302.05049),
    who tune on the target client alone. Here the priority clients tune the model together, by FedAvg. ``last`` is the
    part of the rounds, from 0 to 1. The broadcast's ε says which part it is: infinity, or 0.

    >>> rule = FineTuned(last=0.25)
    >>> [rule.epsilon_at(round, 8) for round in (0, 5, 6, 7)]
    [inf, inf, 0.0, 0.0]
    >>> FineTuned(last=2)
    Traceback (most recent call last):
    fedalign.errors.FedalignError: FineTuned's last must be a part of the rounds, from 0 to 1, not 2
    """

    last: float = 0.2
    match_on: MatchOn | None = None

    def __post_init__(self) -> None:
        number = isinstance(self.last, numbers.Real) and not isinstance(self.last, bool)
        if not number or not 0 <= self.last <= 1:
            raise FedalignError(f"FineTuned's last must be a part of the rounds, from 0 to 1, not {self.last!r}")

    def epsilon_at(self, round: int, rounds: int) -> float:
        """Return infinity while everybody takes part, and 0 in the last rounds."""
        return 0.0 if round >= rounds - math.floor(self.last * rounds + 0.5) else math.inf

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Offer until the fine-tuning begins."""
        return broadcast.epsilon is None or broadcast.epsilon > 0

    def select(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> Selection:
        """Admit every free client that offers, until the fine-tuning begins."""
        return Selection(tuple(offers) if broadcast.epsilon is None or broadcast.epsilon > 0 else ())

    def why(self, own: Measure, broadcast: Broadcast, admitted: bool) -> str:
        """Say which part of the run it is."""
        return "everyone is admitted" if admitted else "fine-tuning on the priority clients"
