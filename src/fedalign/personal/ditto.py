"""Ditto: a personal model that is pulled towards the shared one.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization" (ICML 2021,
arXiv:2012.04221). A client minimises ``F_k(v) + μ/2·‖v − w‖²``, where ``w`` is the shared model.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from fedalign.errors import FedalignError
from fedalign.personal.method import Model, PersonalRequest, PersonalRun, Start, Train
from fedalign.personal.passes import EarlyStopped


@dataclass(frozen=True)
class Ditto(EarlyStopped):
    """Train a personal model from the served one, with a proximal pull of weight ``mu`` towards it.

    The objective is Ditto's at the final served model. With ``mu = 0`` it is refinement; a large ``mu`` keeps the
    personal model near the shared one.

    >>> Ditto(mu=-1.0)
    Traceback (most recent call last):
    fedalign.errors.FedalignError: ditto.mu must be at least 0, not -1.0
    """

    name: ClassVar[str] = "ditto"
    mu: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.mu, numbers.Real) or not 0 <= float(self.mu) < math.inf:
            raise FedalignError(f"{self.label}.mu must be at least 0, not {self.mu!r}")

    def personalise(self, start: Start) -> PersonalRun:
        """Train with a pull towards the served model, and keep the pass that is best on held-out data."""

        def one_pass(model: Model, number: int) -> Generator[PersonalRequest, Any, Model | None]:
            return (yield Train(model, number, self.lr, self.mu, start.served))

        return (yield from self.best_of(start.served, one_pass))
