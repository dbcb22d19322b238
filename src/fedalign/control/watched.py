"""A figure of the rounds that is watched: which way is better, and the best so far."""

from __future__ import annotations

import math
from typing import Literal

from fedalign.callbacks import RunInfo
from fedalign.errors import FedalignError
from fedalign.protocol.metric_values import check_name, figure_of, is_diverging
from fedalign.protocol.records import RoundRecord

Mode = Literal["auto", "max", "min"]
_SMALL_IS_GOOD = ("loss", "error", "mae", "mse", "ece", "objective", "rho", "attack_success")


class Watched:
    """The best value so far of a figure, such as ``"test_accuracy"``, ``"f1"`` or ``"f1.free"``, and its round.

    ``mode`` says whether ``"max"`` or ``"min"`` is better; ``"auto"`` takes the smaller for losses and errors. A value
    counts as better if it is so by more than ``min_delta``. Raises :class:`FedalignError` for other arguments.

    >>> Watched("test_loss").sign, Watched("f1.free").sign
    (-1, 1)
    """

    def __init__(self, metric: str, mode: Mode = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("auto", "max", "min"):
            raise FedalignError(f"mode must be 'auto', 'max' or 'min', not {mode!r}")
        if not min_delta >= 0:
            raise FedalignError(f"min_delta must be 0 or more, not {min_delta!r}")
        low = mode == "min" or (mode == "auto" and any(part in metric.lower() for part in _SMALL_IS_GOOD))
        self.metric, self.sign, self._min_delta = metric, -1 if low else 1, min_delta
        self.best: float | None = None
        self.round: int | None = None  #: of the best value

    def check(self, run: RunInfo) -> None:
        """Refuse a figure that this run's rounds do not have."""
        check_name(self.metric, run.metrics)

    def start(self) -> None:
        """Forget what was seen."""
        self.best = self.round = None

    def improves(self, record: RoundRecord) -> bool:
        """Take a round's value, and say whether it is the best so far.

        Raises :class:`FedalignError` if no round so far has had a value, as without test data. A model that diverges
        has no value either, and is no better.
        """
        value = figure_of(record, self.metric)
        if value is None and self.best is None and record.skipped is None and not is_diverging(record):
            raise FedalignError(
                f"{self.metric!r} has no value in round {record.round}, so it cannot be watched; "
                "is there data to measure it on?"
            )
        if value is None or not math.isfinite(value):
            return False
        if self.best is not None and self.sign * (value - self.best) <= self._min_delta:
            return False
        self.best, self.round = value, record.round
        return True
