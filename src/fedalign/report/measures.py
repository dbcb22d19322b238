"""The figures of a round that a report shows, and which of them a run is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedalign.protocol.records import History, RoundRecord
from fedalign.rules.rule import Split

Histories = Mapping[str, Mapping[int, History]]  #: by arm, then by seed


@dataclass(frozen=True)
class Measure:
    """A number of every round. ``key`` names it in the record, ``label`` in words; ``percent``: it is a fraction."""

    key: str
    label: str
    percent: bool = False
    higher: bool = False

    @property
    def split(self) -> Split:
        """The data that it is measured on."""
        return "test" if self.key.startswith("test_") else "train" if self.key.startswith("train_") else "heldout"

    @property
    def words(self) -> str:
        """What it is, without saying of which model: ``held-out accuracy``, for example."""
        return self.label.partition(" of the model")[0]

    def of(self, record: RoundRecord) -> float | None:
        """Return the number of a round, or None if the round has none."""
        metric, dot, part = self.key.rpartition(".")
        source = record.metrics.get(metric) if dot else record
        value = getattr(source, part, None)
        return None if value is None else float(value)

    def text(self, value: float) -> str:
        """Write a value as a reader expects it: percent with one digit, other numbers with three.

        >>> Measure("test_accuracy", "test accuracy", percent=True).text(0.8693)
        '86.9 %'
        """
        return f"{100 * value:.1f} %" if self.percent else f"{value:.3f}" if abs(value) < 1e4 else f"{value:.2e}"

    def difference(self, value: float) -> str:
        """Write a difference of two values, without its sign.

        >>> Measure("test_accuracy", "test accuracy", percent=True).difference(-0.012)
        '1.2 points'
        """
        return f"{100 * abs(value):.1f} points" if self.percent else f"{abs(value):.3f}"


TEST_ACCURACY = Measure("test_accuracy", "test accuracy", percent=True, higher=True)
TEST_LOSS = Measure("test_loss", "test loss")
HELDOUT_ACCURACY = Measure("heldout_accuracy", "held-out accuracy", percent=True, higher=True)
HELDOUT_LOSS = Measure("heldout_loss", "held-out loss")
SENT_ACCURACY = Measure("global_accuracy", "held-out accuracy of the model sent out", percent=True, higher=True)
SENT_LOSS = Measure("global_loss", "held-out loss of the model sent out")
TRAIN_LOSS = Measure("train_loss", "training loss")
MEASURES = (
    TEST_ACCURACY,
    TEST_LOSS,
    HELDOUT_ACCURACY,
    HELDOUT_LOSS,
    SENT_ACCURACY,
    SENT_LOSS,
    TRAIN_LOSS,
    Measure("admitted", "free clients admitted"),
    Measure("theta", "θ, the priority clients' share, mean so far"),
    Measure("rho", "ρ, the bias term of the bound, so far"),
    Measure("attack_success", "success of the backdoor", percent=True),
)


def measures_of(histories: Histories) -> list[Measure]:
    """Return the figures that runs may have: those of every run, and the user's own metrics."""
    rounds = [r for runs in histories.values() for h in runs.values() for r in h.rounds]
    metrics = dict.fromkeys(name for r in rounds for name in r.metrics)
    parts = ("priority", "free")
    return [*MEASURES, *(Measure(f"{name}.{part}", f"{name}, {part} clients") for name in metrics for part in parts)]


def has_values(histories: Histories, measure: Measure) -> bool:
    """Tell whether some round of some run has this number, and for counts and shares: whether it ever changes."""
    values = (measure.of(r) for runs in histories.values() for h in runs.values() for r in h.rounds)
    dull = {"admitted": 0.0, "theta": 1.0, "rho": 0.0}.get(measure.key)
    return any(value is not None and value != dull for value in values)


def headline(histories: Histories) -> Measure:
    """Choose the figure that arms are ranked by: on test data if there is some, else on held-out or training data.

    Accuracies come before losses, which alone exist for regression. Records of version 0.1 have held-out figures of
    the model sent out alone.
    """
    candidates = (TEST_ACCURACY, TEST_LOSS, HELDOUT_ACCURACY, HELDOUT_LOSS, SENT_ACCURACY, SENT_LOSS, TRAIN_LOSS)
    return next((measure for measure in candidates if has_values(histories, measure)), TEST_ACCURACY)


def accuracy(histories: Histories) -> Measure | None:
    """Choose the accuracy that pictures show: on test data if there is some, else on held-out data, if any."""
    candidates = (TEST_ACCURACY, HELDOUT_ACCURACY, SENT_ACCURACY)
    return next((measure for measure in candidates if has_values(histories, measure)), None)
