"""The figures of a metric in a round, and the numbers of a round by name."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedalign.errors import FedalignError, nearest

if TYPE_CHECKING:
    from fedalign.protocol.records import RoundRecord

_PARTS = ("priority", "free", "priority_pooled", "free_pooled")
_TYPES = ("int", "float", "int | None", "float | None")  # of a record's fields that are numbers


@dataclass(frozen=True)
class MetricValues:
    """One metric of the model that a round serves.

    ``priority`` and ``free`` are means over these clients, weighted by their sample counts ``p_k``. The pooled figures
    are the metric of all their samples together. ``clients`` holds every client's own value, in the order of ids.
    A value is None where it is undefined or there is no data. ``split`` is the data that it was measured on.
    """

    priority: float | None = None
    free: float | None = None
    priority_pooled: float | None = None
    free_pooled: float | None = None
    clients: tuple[float | None, ...] = ()
    split: str = "test"


def figure_of(record: RoundRecord, name: str) -> float | None:
    """Return a number of a round by its name, as in ``"test_accuracy"``, ``"f1"`` or ``"f1.free"``.

    The name of a metric alone means its mean over the priority clients; ``.free``, ``.priority_pooled`` and
    ``.free_pooled`` are the other figures. A name that the round does not have gives None: a model whose outputs are
    not finite has no metrics.
    """
    if name in _numbers():
        value: float | None = getattr(record, name)
        return value
    metric, part = split_name(name, record.metrics)
    found: float | None = getattr(record.metrics.get(metric), part, None)
    return found


def is_diverging(record: RoundRecord) -> bool:
    """Say whether some loss of a round is not finite: its model has no other figures then."""
    losses = (record.global_loss, record.test_loss, record.train_loss, record.heldout_loss)
    return not all(math.isfinite(loss) for loss in losses if loss is not None)


def figures_of(record: RoundRecord) -> dict[str, float]:
    """Return all numbers of a round that are known, by name; trackers write them as curves.

    >>> values = MetricValues(priority=0.7, free=0.5)
    >>> from fedalign.protocol.records import RoundRecord
    >>> record = RoundRecord(0, 0.2, 1.1, None, 0.6, None, None, False, None, 2, 2, (), metrics={"f1": values})
    >>> {name: figures_of(record)[name] for name in ("test_accuracy", "f1.priority", "f1.free")}
    {'test_accuracy': 0.6, 'f1.priority': 0.7, 'f1.free': 0.5}
    """
    found = {name: getattr(record, name) for name in _numbers()}
    for metric, values in record.metrics.items():
        found |= {f"{metric}.{part}": getattr(values, part) for part in _PARTS}
    return {name: float(value) for name, value in found.items() if value is not None}


def check_name(name: str, metrics: Collection[str]) -> None:
    """Refuse a name of a figure that no round of a run with these metrics can have.

    A metric with several values, such as one for each class, is named with the value: ``recall.0``.
    """
    known = [*_numbers(), *metrics]
    if name not in _numbers() and not any(name == metric or name.startswith(f"{metric}.") for metric in metrics):
        raise FedalignError(f"there is no figure {name!r} in a round; {nearest(name, known)}")


def split_name(name: str, metrics: object) -> tuple[str, str]:
    """Split the name of a figure into the metric and the part of its values.

    >>> split_name("f1.free", {"f1"}), split_name("recall.0", {"recall.0"})
    (('f1', 'free'), ('recall.0', 'priority'))
    """
    metric, _, part = name.rpartition(".")
    if name not in metrics and part in _PARTS:  # type: ignore[operator]
        return metric, part
    return name, "priority"


@functools.cache
def _numbers() -> tuple[str, ...]:
    """List the numbers of a round: the fields of a record that are numbers, and how many clients were admitted."""
    from fedalign.protocol.records import RoundRecord  # which needs this module

    fields = [field.name for field in dataclasses.fields(RoundRecord) if field.type in _TYPES and field.name != "round"]
    return (*fields, "admitted")


def json_of(values: MetricValues) -> dict[str, object]:
    """Return the values as ``rounds.jsonl`` holds them."""
    return {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}


def from_json(row: dict[str, object]) -> MetricValues:
    """Read a metric's values from a line of ``rounds.jsonl``."""
    return MetricValues(**{**row, "clients": tuple(row["clients"])})  # type: ignore[arg-type]
