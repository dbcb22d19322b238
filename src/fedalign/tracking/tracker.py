"""What trackers have in common: what they write of a round and of a run, under the same names."""

from __future__ import annotations

import abc
import csv
import importlib.util
import io
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import tomli_w
from safetensors.torch import save_file

from fedalign.callbacks import Callback, RunInfo, Stopped
from fedalign.errors import DivergedError, FedalignError
from fedalign.experiments.recorder import named_tensors
from fedalign.experiments.store import RunStore
from fedalign.protocol.messages import Snapshot
from fedalign.protocol.metric_values import figures_of
from fedalign.protocol.records import Decision, RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COSTS = ("models_down", "models_up", "samples")
_DECISIONS: tuple[Decision, ...] = ("trained", "admitted", "base", "declined", "refused", "lost", "absent")
_COLUMNS = ("round", "id", "name", "priority", "reachable", "decision", "weight", "loss", "accuracy", "reason")


class Tracker(Callback, abc.ABC):
    """A tracker: subclasses say how curves, texts, pictures and the model are written.

    A round is written after the store has it (:meth:`on_snapshot`), so that a tracker never knows more rounds than
    ``rounds.jsonl``. Making one raises :class:`FedalignError` if its package is not installed.
    """

    needs_model = False
    package: ClassVar[str]  #: the module that must be installed
    extra: ClassVar[str]  #: the extra of fedalign that installs it
    title: ClassVar[str]  #: its name in messages

    def __init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise FedalignError(
                f"the tracker {self.extra} needs {self.title}, which is not installed: "
                f"pip install 'fedalign[{self.extra}]'"
            )
        self.run: RunInfo
        self.records: list[RoundRecord] = []

    def on_start(self, run: RunInfo) -> None:
        """Open the tracker's run, and write the rounds before that it does not have."""
        self.run, self.records = run, list(run.past)
        known = self.open()
        for record in self.records:
            if record.round >= known:
                self.write(record)

    def on_snapshot(self, record: RoundRecord, snapshot: Snapshot) -> None:
        """Write a finished round."""
        self.records.append(record)
        self.write(record)

    @abc.abstractmethod
    def open(self) -> int:
        """Open the run :attr:`run`, write its settings, and return how many of its rounds are already written."""

    @abc.abstractmethod
    def write(self, record: RoundRecord) -> None:
        """Write the numbers of a finished round to the tracker."""


def curves_of(record: RoundRecord) -> dict[str, float]:
    """Return a round's numbers under the names that trackers show, such as ``round/test_loss`` and ``metric/f1.free``.

    >>> record = RoundRecord(0, 0.2, 1.1, None, 0.6, None, None, False, None, 2, 1, ())
    >>> curves = curves_of(record)
    >>> curves["round/test_accuracy"], curves["cost/models_down"], curves["clients/admitted"]
    (0.6, 2.0, 0.0)
    """
    found = {}
    for name, value in figures_of(record).items():
        if name != "admitted" and not math.isnan(value):
            metric = name.rpartition(".")[0] in record.metrics
            found[f"{'cost' if name in _COSTS else 'metric' if metric else 'round'}/{name}"] = value
    decisions = Counter(client.decision for client in record.clients)
    return found | {f"clients/{decision}": float(decisions[decision]) for decision in _DECISIONS}


def decision_rows(records: list[RoundRecord]) -> list[list[Any]]:
    """Return a row for every round and client, with the decision and its reason; the first row has the headings."""
    rows: list[list[Any]] = [list(_COLUMNS)]
    for record in records:
        for client in record.clients:
            rows.append([record.round, *(getattr(client, column) for column in _COLUMNS[1:])])
    return rows


def decision_table(records: list[RoundRecord]) -> str:
    """Return these rows as CSV."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(decision_rows(records))
    return file.getvalue()


def settings_text(run: RunInfo) -> str:
    """Return the settings of a run's experiment as TOML; what TOML cannot hold is written as text."""
    facts = {"arm": run.arm, "seed": run.seed, "rounds": run.rounds, "metrics": list(run.metrics)}
    return tomli_w.dumps(dict(run.settings) or facts)


def run_name(run: RunInfo) -> str:
    """Name a run, as its folder is named.

    >>> run_name(RunInfo("fedalign", 3, 100)), run_name(RunInfo("", 0, 100))
    ('fedalign/seed-3', 'seed-0')
    """
    return f"{run.arm}/seed-{run.seed}" if run.arm else f"seed-{run.seed}"


def outcome(result: Any) -> str:
    """Say in a sentence how a run ended."""
    error: DivergedError | None = result.error
    stopped: Stopped | None = result.stopped
    if error is not None:
        return str(error)
    return str(stopped) if stopped is not None else f"finished after {len(result.history)} rounds"


def model_file(run: RunInfo, result: Any, folder: Path) -> Path:
    """Return the file of a run's final weights; it is written into ``folder`` if the run has no folder of its own."""
    if run.folder is not None and RunStore(run.folder).model.exists():
        return RunStore(run.folder).model
    names = [client.name for client in result.history[-1].clients]
    path = folder / "model.safetensors"
    save_file(named_tensors(names, result.model), path)
    return path


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for files on their way to a tracker."""
    return tempfile.TemporaryDirectory(prefix="fedalign-")


def picture_of(records: list[RoundRecord], title: str) -> Figure:
    """Draw a run: its accuracy and loss over the rounds, and what was decided about every client in every round."""
    from fedalign.tracking.picture import draw

    return draw(records, title)
