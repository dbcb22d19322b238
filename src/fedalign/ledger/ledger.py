"""The settings of a contribution ledger: how clients are valued, and with which key the ledger is signed."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.ledger.gtg_shapley import GTGShapley
from fedalign.ledger.valuation import Valuation


@dataclass(frozen=True)
class Ledger:
    """Keep a ledger: value every client in every round by what its update does to the priority clients' loss.

    ``method`` is a :class:`Valuation`, or a name of one with its options. Updates whose cosine is at least ``copies``
    are copies of each other and count once. With ``calibrated``, all losses of a round are those at one temperature,
    the best one of the priority clients' own aggregate and at least 1: no update is worth something for making an
    overconfident model less confident. ``priority=False`` values free clients alone.
    ``key`` is the file of a private key to sign the ledger with.

    >>> Ledger("leave-one-out").method
    LeaveOneOut()
    >>> Ledger(copies=2)
    Traceback (most recent call last):
    fedalign.errors.FedalignError: ledger.copies must be above 0 and at most 1, not 2
    """

    method: Any = field(default_factory=GTGShapley)  # a Valuation, once made
    copies: float = 0.999
    calibrated: bool = True
    priority: bool = True
    key: Path | None = None

    def __post_init__(self) -> None:
        from fedalign.registry import VALUATIONS

        made = VALUATIONS.accept("ledger.method", self.method)
        if not isinstance(made, Valuation):
            raise FedalignError(f"ledger.method must be a fedalign.Valuation or a name of one, not {made!r:.60}")
        object.__setattr__(self, "method", made)
        if self.key is not None:
            object.__setattr__(self, "key", Path(self.key))
        for name in ("calibrated", "priority"):
            if not isinstance(getattr(self, name), bool):
                raise FedalignError(f"ledger.{name} must be true or false, not {getattr(self, name)!r}")
        number = isinstance(self.copies, numbers.Real) and not isinstance(self.copies, bool)
        if not number or not 0 < self.copies <= 1:
            raise FedalignError(f"ledger.copies must be above 0 and at most 1, not {self.copies!r}")

    @property
    def valuation(self) -> Valuation:
        """The method, as an object."""
        assert isinstance(self.method, Valuation)
        return self.method

    @property
    def method_name(self) -> str:
        """What records and files call the method: its name in settings, or that of its class."""
        from fedalign.registry import VALUATIONS

        own = f"{type(self.method).__module__}:{type(self.method).__name__}"
        return next((name for name, (reference, _) in VALUATIONS.entries.items() if reference == own), own)

    def check(self, free: int, priority: int) -> None:
        """Raise :class:`FedalignError`, before any work, for a federation with too many clients for the method."""
        most = self.valuation.most_players()
        for count, role in ((free, "free"), (priority if self.priority else 0, "priority")):
            if most is not None and count > most:
                raise FedalignError(
                    f"ledger.method {self.method_name!r} values at most {most} clients at once, and there are {count} "
                    f"{role} clients; use gtg-shapley or leave-one-out"
                )
