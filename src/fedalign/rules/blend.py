"""Blended AutoALIGN's rule: how much each candidate counts in the served model.

The rounds are in :mod:`fedalign.protocol.blended`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedalign.errors import FedalignError
from fedalign.rules.auto import AutoAlign

_LEAST = 1e-6  # a candidate of less weight is left out


@dataclass(frozen=True)
class Blend(AutoAlign):
    """AutoALIGN that serves a weighted mean of its candidates in place of the best one.

    Few held-out samples cannot tell which candidate is best, and the winner is then chance. So the candidates are
    averaged. Each weighs ``exp(−n · loss / caution)``, where ``n`` is the number of held-out samples of the priority
    clients: with many samples the best one is served, with few the mean of all. If the loss is convex in the weights
    of the model, the loss of that mean is at most ``log(2m) · caution / n`` above the best of ``m`` candidates.

    The priority clients also train the *served* model on for a round. The result, the *kept* model, is a candidate as
    well, and before the losses are known it weighs as much as all others together. So what was good to serve is tuned
    further for as long as that helps.

    Losses are compared at the best temperature; see ``calibrated`` in :class:`fedalign.AutoAlign`, which also tells
    about the other options.

    >>> [round(weight, 3) for weight in Blend().weigh([1.0, 1.1], samples=400, kept=False)]
    [1.0, 0.0]
    >>> [round(weight, 3) for weight in Blend().weigh([1.0, 1.1], samples=4, kept=False)]
    [0.525, 0.475]
    >>> Blend(caution=0)
    Traceback (most recent call last):
    fedalign.errors.FedalignError: Blend's caution must be a number above 0, not 0
    """

    algorithm: ClassVar[str] = "blended"
    calibrated: bool = True
    caution: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.caution, numbers.Real) and not isinstance(self.caution, bool)
        if not number or not 0 < self.caution < math.inf:
            raise FedalignError(f"Blend's caution must be a number above 0, not {self.caution!r}")

    def weigh(self, losses: Sequence[float], samples: float, kept: bool) -> list[float]:
        """Return a weight for each candidate; they sum to 1. With ``kept``, the last one is the kept model.

        A candidate without a finite loss weighs nothing. If none has one, the first counts alone: that of the priority
        clients.
        """
        finite = [loss for loss in losses if math.isfinite(loss)]
        if not finite:
            return [1.0] + [0.0] * (len(losses) - 1)
        best, fresh = min(finite), len(losses) - kept
        weights = [
            math.exp(-samples * (loss - best) / self.caution) / (fresh if i < fresh else 1)
            if math.isfinite(loss)
            else 0.0
            for i, loss in enumerate(losses)
        ]
        total = math.fsum(weights)
        weights = [weight if weight >= _LEAST * total else 0.0 for weight in weights]
        total = math.fsum(weights)
        return [weight / total for weight in weights]
