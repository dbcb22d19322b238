"""Which figures a run's tables and plots show: on test data or, where there is none, on held-out data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

HOW_TO_TEST = (
    "There is no test data, so these are figures on held-out data, by which rules choose clients: they may be too "
    "good. To add a test set, set data.test_fraction = 0.2, or give test data of the clients."
)


@dataclass(frozen=True)
class Shown:
    """The data that figures are measured on: ``test`` or ``heldout``, and what to call it."""

    split: Literal["test", "heldout"]

    @property
    def accuracy(self) -> str:
        """The key of accuracies in ``summary.json`` and in rounds."""
        return f"{self.split}_accuracy"

    @property
    def loss(self) -> str:
        """The key of losses in ``summary.json`` and in rounds."""
        return f"{self.split}_loss"

    @property
    def words(self) -> str:
        """The data in words, to be followed by "accuracy", "loss" or "data"."""
        return "test" if self.split == "test" else "held-out"

    @property
    def advice(self) -> str | None:
        """What to say about figures that are not from test data; None if they are."""
        return None if self.split == "test" else HOW_TO_TEST


def shown(summary: dict[str, Any]) -> Shown:
    """Tell which figures to show of a run; ``summary`` is the content of ``summary.json``.

    >>> arm = {"test_loss": {"mean": None}, "heldout_loss": {"mean": 0.5}}
    >>> shown({"arms": {"priority": arm}}).words
    'held-out'
    """
    arms = summary["arms"].values()
    tested = any(figures["test_loss"]["mean"] is not None for figures in arms)
    held = any(figures.get("heldout_loss", {}).get("mean") is not None for figures in arms)
    return Shown("heldout" if held and not tested else "test")
