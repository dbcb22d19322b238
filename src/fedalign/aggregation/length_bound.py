"""A server step that refuses long updates."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

from fedalign.aggregation.update_steps import ServerStep
from fedalign.errors import FedalignError


@dataclass(frozen=True)
class LengthBound(ServerStep):
    """Refuse a free client's update that is more than ``times`` times as long as the longest priority client's.

    >>> LengthBound(10).refuses(50.0, [1.0, 2.0])
    'its update is 25 times as long as the longest of the priority clients'
    """

    times: float = 10.0

    def __post_init__(self) -> None:
        real = isinstance(self.times, numbers.Real) and not isinstance(self.times, bool)
        if not real or not 0 < self.times < math.inf:
            raise FedalignError(f"times must be a positive number, not {self.times!r}")

    def refuses(self, length: float, priority_lengths: Sequence[float]) -> str | None:
        """Compare the length with the longest of the priority clients; a length of 0 there allows everything."""
        longest = max(priority_lengths, default=0.0)
        if longest and length > self.times * longest:
            return f"its update is {length / longest:.3g} times as long as the longest of the priority clients"
        return None
