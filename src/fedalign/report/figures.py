"""Which figures a run's tables and plots show: on test data or, where there is none, on held-out or training data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

_HOW_TO_TEST = "To add a test set, set data.test_fraction = 0.2, or give test data of the clients."
_ADVICE = {
    "test": None,
    "heldout": "There is no test data, so these are figures on held-out data, by which rules choose clients: they may "
    f"be too good. {_HOW_TO_TEST}",
    "train": "There is neither test data nor held-out data, so these are losses on training data, which say little. "
    f"{_HOW_TO_TEST}",
}
_WORDS = {"test": "test", "heldout": "held-out", "train": "training"}


@dataclass(frozen=True)
class Shown:
    """The data that figures are measured on, and what to call it; on training data there are losses alone."""

    split: Literal["test", "heldout", "train"]

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
        return _WORDS[self.split]

    @property
    def advice(self) -> str | None:
        """What to say about figures that are not from test data; None if they are."""
        return _ADVICE[self.split]


def shown(summary: dict[str, Any]) -> Shown:
    """Tell which figures to show of a run; ``summary`` is the content of ``summary.json``.

    >>> arm = {"test_loss": {"mean": None}, "heldout_loss": {"mean": 0.5}}
    >>> shown({"arms": {"priority": arm}}).words
    'held-out'
    """

    def has(key: str) -> bool:
        return any(figures.get(key, {}).get("mean") is not None for figures in summary["arms"].values())

    if has("test_loss"):
        return Shown("test")
    if has("heldout_loss"):
        return Shown("heldout")
    return Shown("train" if has("train_loss") else "test")
