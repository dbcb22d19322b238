"""Measures that clients gave together with others, before the algorithm asks for them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch

from fedalign.protocol.messages import Evaluate, Measures
from fedalign.rules.rule import Measure

Key = tuple[str, str, int]  #: a model's digest, a split, a client


class EarlyMeasures:
    """Remembers measures until the algorithm asks for them, which saves an exchange with the clients.

    >>> model, early = torch.ones(3), EarlyMeasures()
    >>> early.store({(digest(model), "heldout", 0): Measure(0.5, None, 10)})
    >>> early.recall(Evaluate(((model, (0,)),), "heldout"))
    [{0: Measure(loss=0.5, accuracy=None, samples=10)}]
    >>> early.recall(Evaluate(((model, (0, 1)),), "heldout")) is None
    True
    """

    def __init__(self) -> None:
        self._known: dict[Key, Measure] = {}

    def store(self, found: Mapping[Key, Measure | None]) -> None:
        """Keep these measures in place of the earlier ones; None stands for a client that did not answer."""
        self._known = {key: measure for key, measure in found.items() if measure is not None}

    def forget(self) -> None:
        """Drop everything, so that the clients are asked again."""
        self._known = {}

    def not_finite(self) -> list[int]:
        """Return the clients that measured a loss which is not finite."""
        return sorted({key[2] for key, measure in self._known.items() if not math.isfinite(measure.loss)})

    def recall(self, request: Evaluate) -> list[Measures] | None:
        """Return the reply to a request if all that it asks for is known, else None."""
        if not self._known or not request.asked:
            return None
        keys = [{k: (digest(model), request.split, k) for k in clients} for model, clients in request.asked]
        if any(key not in self._known for of_model in keys for key in of_model.values()):
            return None
        return [{k: self._known[key] for k, key in of_model.items()} for of_model in keys]


def digest(model: torch.Tensor) -> str:
    """Return a SHA-256 of a model's numbers: equal models have equal digests."""
    return hashlib.sha256(model.detach().cpu().contiguous().numpy().data).hexdigest()
