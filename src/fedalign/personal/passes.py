"""Passes over a client's data that stop when its held-out loss no longer improves."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from fedalign.errors import FedalignError
from fedalign.personal.method import Measured, Model, Personalised, PersonalMethod, PersonalRequest, PersonalRun

#: Make the model of a pass from that of the pass before; None: it is not finite.
Pass = Callable[[Model, int], Generator[PersonalRequest, Any, Model | None]]


@dataclass(frozen=True)
class EarlyStopped(PersonalMethod):
    """A method of several passes, of which the one with the lowest held-out loss counts.

    ``epochs`` is the largest number of passes. After ``patience`` passes without a lower loss, the client stops.
    The model that a client starts from counts as well: one that no pass improves stays as it is. With ``patience = 0``
    nothing is measured, and the model of the last pass is the client's. ``lr`` is the learning rate; by default that of
    the client's last local step in the run.
    """

    epochs: int = 20
    patience: int = 5
    lr: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("patience", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
                raise FedalignError(f"{self.label}.{name} must be a whole number of at least {least}, not {value!r}")
        if self.lr is not None and not (isinstance(self.lr, numbers.Real) and 0 < float(self.lr) < math.inf):
            raise FedalignError(f"{self.label}.lr must be a positive number, not {self.lr!r}")

    @property
    def needs_heldout(self) -> bool:
        """Whether held-out data decides when to stop."""
        return self.patience > 0

    def best_of(self, first: Model, one_pass: Pass) -> PersonalRun:
        """Do the passes from a first model, and return the best one."""
        best, at, lowest = first, 0, math.inf
        if self.patience:
            lowest = (yield Measured((first,)))[0].loss
        model: Model | None = first
        for number in range(self.epochs):
            model = yield from one_pass(model, number)
            if model is None:  # it left the finite numbers: what came before is the client's model
                break
            if not self.patience:
                best, at = model, number + 1
                continue
            loss = (yield Measured((model,)))[0].loss
            if loss < lowest or (math.isnan(lowest) and not math.isnan(loss)):
                best, at, lowest = model, number + 1, loss
            elif number + 1 - at >= self.patience:
                break
        return Personalised(best, at)
