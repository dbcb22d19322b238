"""Refinement: a client goes on from the served model, or from the initial one, on its own data."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from fedalign.personal.method import Model, PersonalRequest, PersonalRun, Start, Train
from fedalign.personal.passes import EarlyStopped


@dataclass(frozen=True)
class Refine(EarlyStopped):
    """Train the served model further on the client's own data, until its held-out loss no longer improves.

    >>> Refine(epochs=10).needs_heldout, Refine(patience=0).needs_heldout
    (True, False)
    """

    name: ClassVar[str] = "refine"

    def personalise(self, start: Start) -> PersonalRun:
        """Refine the served model."""
        return (yield from self.best_of(start.served, self._pass))

    def _pass(self, model: Model, number: int) -> Generator[PersonalRequest, Any, Model | None]:
        return (yield Train(model, number, self.lr))


@dataclass(frozen=True)
class FromScratch(Refine):
    """Train the initial model on the client's own data with early stopping: a stronger rival than the arm ``local``.

    What a client could have without the federation, if it stops as carefully as one that refines. Unless ``lr`` says
    otherwise, it trains at the rate of the run's first round: the last one's may be too low to begin with.

    >>> FromScratch().epochs
    200
    """

    name: ClassVar[str] = "scratch"
    epochs: int = 200
    patience: int = 20

    def personalise(self, start: Start) -> PersonalRun:
        """Train from the initial model."""
        return (yield from self.best_of(start.initial, self._pass))

    def _pass(self, model: Model, number: int) -> Generator[PersonalRequest, Any, Model | None]:
        return (yield Train(model, number, self.lr, first_rate=True))
