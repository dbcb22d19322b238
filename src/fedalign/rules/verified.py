"""prototype"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from fedalign.rules.rule import Broadcast, MatchOn, Measure, Rule, Selection


@dataclass(frozen=True)
class Verified(Rule):
    algorithm: ClassVar[str] = "verified"
    within: float = math.inf  # clamp
    prefer: float = 0.0  # loss advantage (part) that the unclamped needs
    total: float = math.inf
    tolerance: float = 0.02
    cosine: float = -0.1
    training: str = "broad"
    clip: float = 1.0
    smooth: float = 0.3
    credit: bool = False
    log: list = field(default_factory=list, compare=False)
    match_on: MatchOn | None = None
    needs_updates: bool = field(default=True, init=False)

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        return True

    def epsilon_at(self, round: int, rounds: int):
        return math.inf

    def select(self, offers, broadcast):
        return Selection(tuple(offers))
