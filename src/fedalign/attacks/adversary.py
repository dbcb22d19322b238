"""The adversary of a run, as a setting: which free clients are hostile, what they do, what they report, and when."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedalign.attacks.attack import Attack
from fedalign.errors import FedalignError, nearest

Report = Literal["aligned", "truthful", "high", "low"]
_REPORTS = ("aligned", "truthful", "high", "low")
_KNOWS = ("all", "own")


@dataclass(frozen=True)
class Adversary:
    """Hostile free clients. ``kind`` is an attack or several, which are combined in order: objects or registry texts.

    ``fraction`` of the free clients are hostile, drawn by the run's seed, or else those that ``clients`` names.
    ``report`` is the loss that they claim: ``"aligned"`` is F itself, which puts them before all honest clients in
    every order; ``"truthful"`` is their own measure, and they then follow the rule; ``"high"`` and ``"low"`` are a
    hundred times and a hundredth of F. ``samples`` multiplies the sample count that they claim. They are hostile from
    round ``start`` on (a fraction of the rounds, or a round), or in the ``last`` rounds alone; with ``period`` they are
    hostile and honest by turns of so many rounds. With ``knows="all"`` they know the updates of all honest clients.

    >>> Adversary("sign-flip(scale=9.9)", fraction=0.5, start=20).attacks
    (SignFlip(scale=9.9),)
    >>> [a.has_trigger for a in Adversary(["backdoor(target=3)", "at-cosine"]).attacks]
    [True, False]
    """

    kind: Attack | str | Sequence[Attack | str | Mapping[str, Any]] | Mapping[str, Any]
    fraction: float = 0.25
    clients: Sequence[str] | None = None
    report: Report = "aligned"
    samples: float = 1.0
    start: float = 0
    last: int | None = None
    period: int | None = None
    knows: Literal["all", "own"] = "all"

    def __post_init__(self) -> None:
        from fedalign.registry import ATTACKS

        if not isinstance(self.kind, Attack | str | Mapping | Sequence):
            raise FedalignError(f"adversary.kind must be an attack or a list of attacks, not {self.kind!r}")
        given = [self.kind] if isinstance(self.kind, Attack | str | Mapping) else list(self.kind)
        made = [ATTACKS.accept("adversary.kind", one) for one in given]
        for one in made:
            if not isinstance(one, Attack):
                raise FedalignError(f"adversary.kind must be an attack or a list of attacks, not {one!r}")
        if not made:
            raise FedalignError("adversary.kind names no attack; give at least one")
        object.__setattr__(self, "kind", tuple(made))
        if self.clients is not None and not self.clients:
            raise FedalignError("adversary.clients names nobody; leave it out, or set fraction to 0")
        if not _real(self.fraction) or not 0 <= self.fraction <= 1:
            raise FedalignError(f"adversary.fraction must be a part of the free clients, 0 to 1, not {self.fraction!r}")
        for name, value, known in (("report", self.report, _REPORTS), ("knows", self.knows, _KNOWS)):
            if value not in known:
                raise FedalignError(f"adversary.{name} is {value!r}; {nearest(str(value), list(known))}")
        if not _real(self.samples) or not 0 < self.samples < math.inf:
            raise FedalignError(f"adversary.samples must be a positive factor, not {self.samples!r}")
        if not _real(self.start) or not 0 <= self.start < math.inf:
            raise FedalignError(f"adversary.start must be a round or a fraction of the rounds, not {self.start!r}")
        for name in ("last", "period"):
            value = getattr(self, name)
            whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            if value is not None and (not whole or value < 1):
                raise FedalignError(f"adversary.{name} must be a number of rounds, at least 1, not {value!r}")

    @property
    def attacks(self) -> tuple[Attack, ...]:
        """The attacks, in the order in which they are combined."""
        return self.kind  # type: ignore[return-value]

    @property
    def free_rider(self) -> bool:
        """Whether all that is done is free riding, which harms nobody directly."""
        return all(attack.free_rider for attack in self.attacks)

    def active(self, round: int, rounds: int) -> bool:
        """Say whether the hostile clients are hostile in a round.

        >>> strike = Adversary("label-flip", last=3)
        >>> [t for t in range(10) if strike.active(t, 10)]
        [7, 8, 9]
        """
        start = self.start if isinstance(self.start, numbers.Integral) else _round_of(self.start, rounds)
        if self.last is not None:
            start = max(int(start), rounds - self.last)
        on = self.period is None or (round - int(start)) // self.period % 2 == 0
        return round >= start and on


def _real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _round_of(start: float, rounds: int) -> int:
    return math.floor(start * rounds + 0.5) if start < 1 else int(start)
