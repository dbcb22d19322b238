"""Measures that clients gave together with others, before the algorithm asks for them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from fedalign.flower.model_cache import digest
from fedalign.protocol.messages import Evaluate, Measures, Outcomes
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
        self._silent: set[Key] = set()
        self._outcomes: dict[tuple[str, str, str], dict[int, Outcomes]] = {}

    def store(self, found: Mapping[Key, Measure | None]) -> None:
        """Keep these measures in place of the earlier ones; None stands for a client that did not answer."""
        self._known = {key: measure for key, measure in found.items() if measure is not None}
        self._silent = found.keys() - self._known.keys()

    def forget(self) -> None:
        """Drop everything, so that the clients are asked again."""
        self._known, self._silent, self._outcomes = {}, set(), {}

    def not_finite(self, model: torch.Tensor) -> list[int]:
        """Return the clients that measured a loss of this model which is not finite."""
        name, known = digest(model), self._known.items()
        return sorted({key[2] for key, one in known if key[0] == name and not math.isfinite(one.loss)})

    def store_outcomes(self, pair: tuple[str, str, str], found: Mapping[int, Outcomes]) -> None:
        """Keep how clients compared two models, by their digests, on a split; this replaces earlier comparisons."""
        self._outcomes = {pair: dict(found)}

    def outcomes(self, pair: tuple[str, str, str], clients: Collection[int]) -> dict[int, Outcomes] | None:
        """Return how these clients compared two models; None if one of them was not asked or did not answer.

        >>> early = EarlyMeasures()
        >>> early.store_outcomes(("a", "b", "heldout"), {0: Outcomes(2, 1, 40)})
        >>> early.outcomes(("a", "b", "heldout"), [0])
        {0: Outcomes(gained=2, lost=1, samples=40)}
        """
        found = self._outcomes.get(pair, {})
        return {k: found[k] for k in clients} if found.keys() >= set(clients) and found else None

    def recall(self, request: Evaluate) -> list[Measures] | None:
        """Return the reply to a request if all that it asks for is known, else None.

        Of a request for the record, clients that did not answer are missing in the reply. Losses at other temperatures
        are not kept.
        """
        if request.tempered or not (self._known or self._silent) or not request.asked:
            return None
        keys = [{k: (digest(model), request.split, k) for k in clients} for model, clients in request.asked]
        known = self._known.keys() | (self._silent if request.for_record else set())
        if any(key not in known for of_model in keys for key in of_model.values()):
            return None
        return [{k: self._known[key] for k, key in of_model.items() if key in self._known} for of_model in keys]
