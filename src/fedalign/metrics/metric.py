"""A metric: a function of outputs and targets, or an object as those of torchmetrics, and the data to measure it on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from fedalign.errors import FedalignError
from fedalign.registry import METRICS
from fedalign.settings.user_modules import in_words

MeasuredOn = Literal["auto", "test", "heldout", "train"]
Samples = tuple[torch.Tensor, torch.Tensor]  # outputs and targets


@dataclass(frozen=True)
class Metric:
    """What to compute from a model's outputs and the targets of some samples.

    ``function`` is a function of outputs and targets, or an object with ``reset``, ``update`` and ``compute``, as
    torchmetrics has them. It gives a number, or several as a vector or a dictionary; NaN says that the metric is
    undefined for these samples. ``on`` is the data: ``"auto"`` is the test data, or the held-out data where the
    priority clients have no test data.

    >>> metric = Metric(lambda outputs, targets: (outputs.argmax(1) == targets).float().mean())
    >>> metric.compute("accuracy", [(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))])
    {'accuracy': 0.5}
    """

    function: Callable[[torch.Tensor, torch.Tensor], Any]
    on: MeasuredOn = "auto"

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise FedalignError(f"a metric must be a function of outputs and targets, not {self.function!r}")
        if self.on not in get_args(MeasuredOn):
            raise FedalignError(f"a metric is measured on 'auto', 'test', 'heldout' or 'train', not {self.on!r}")

    @property
    def accumulates(self) -> bool:
        """Whether samples can be given part by part, so that no one holds all of them."""
        return all(callable(getattr(self.function, name, None)) for name in ("reset", "update", "compute"))

    def compute(self, name: str, parts: Sequence[Samples]) -> dict[str, float | None]:
        """Compute the metric of the parts' samples together.

        The result maps names to numbers: ``name`` itself, or ``name.0`` and so on where there are several. It is empty
        if some output is not finite. Raises whatever the function raises, and :class:`FedalignError` for a result that
        is not a number.
        """
        if not parts or not all(bool(torch.isfinite(outputs).all()) for outputs, _ in parts):
            return {}
        if self.accumulates:
            metric = copy.deepcopy(self.function)  # the user's own object keeps its state
            metric.reset()  # type: ignore[attr-defined]
            for outputs, targets in parts:
                metric.update(outputs, targets)  # type: ignore[attr-defined]
            return dict(_numbers(name, metric.compute()))  # type: ignore[attr-defined]
        outputs, targets = (torch.cat(side) if len(parts) > 1 else side[0] for side in zip(*parts, strict=True))
        return dict(_numbers(name, self.function(outputs, targets)))


def _numbers(name: str, value: Any) -> list[tuple[str, float | None]]:
    """Give the numbers of a result by name: a table's by its keys, a vector's by their places."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _numbers(f"{name}.{key}", item)]
    if hasattr(value, "tolist"):  # tensors and NumPy's arrays and numbers
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [pair for place, item in enumerate(value) for pair in _numbers(f"{name}.{place}", item)]
    if not isinstance(value, int | float):
        raise FedalignError(f"the metric {name!r} gave {value!r:.60}, which is not a number")
    return [(name, float(value) if math.isfinite(value) else None)]


def as_metrics(given: Any) -> dict[str, Metric]:
    """Make metrics of what a user gives: functions and objects by name, names as in settings files, or a list of these.

    >>> sorted(as_metrics(["f1", "auc"])), as_metrics({"mine": "f1(on='heldout')"})["mine"].on
    (['auc', 'f1'], 'heldout')
    """
    if isinstance(given, str | list | tuple):
        given = resolve_metrics(given)
    if not isinstance(given, Mapping):
        raise FedalignError(f"metrics must be a table of names and functions, or a list of names, not {given!r}")
    found = {}
    for name, metric in given.items():
        if isinstance(metric, str | Mapping):
            metric = make_metrics(resolve_metrics({name: metric}))[name]
        found[_checked(name)] = metric if isinstance(metric, Metric) else Metric(metric)
    return found


def resolve_metrics(given: Any, folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """Check ``[metrics]`` of a settings file, or a list of names, and give a table for each metric, by its name.

    >>> resolve_metrics(["f1", "top-k(k=3, on='heldout')"])
    {'f1': {'kind': 'f1', 'on': 'auto', 'average': 'macro'}, 'top-k': {'kind': 'top-k', 'on': 'heldout', 'k': 3}}
    """
    if isinstance(given, str):
        given = [text for text in given.split(";") if text.strip()]
    if isinstance(given, list | tuple):
        named: dict[str, Any] = {}
        for place, spec in enumerate(given):
            name = METRICS.split(f"metrics[{place}]", spec)[1].rpartition(":")[2]
            if name in named:
                raise FedalignError(f"metrics names {name!r} twice; give names of your own: {name}-2 = …")
            named[name] = spec
        given = named
    if not isinstance(given, Mapping):
        raise FedalignError(f"metrics must be a section [metrics] or a list of names, not {given!r}")
    return {_checked(name): _resolve(name, spec, folder) for name, spec in given.items()}


def _resolve(name: str, spec: Any, folder: Path | None) -> dict[str, Any]:
    section = f"metrics.{name}"
    where, kind, options = METRICS.split(section, spec)
    METRICS.find(kind, folder, where)
    on = options.pop("on", "auto")
    if on not in get_args(MeasuredOn):
        raise FedalignError(f"{section}.on must be 'auto', 'test', 'heldout' or 'train', not {on!r}")
    table = METRICS.resolve(section, {"kind": kind, **options}, folder)
    return {"kind": table.pop("kind"), "on": on, **table}


def make_metrics(tables: Mapping[str, Mapping[str, Any]], folder: Path | None = None) -> dict[str, Metric]:
    """Make the metrics that checked settings describe."""
    made = {}
    for name, table in tables.items():
        options = {key: value for key, value in table.items() if key != "on"}
        made[name] = Metric(METRICS.make(options, folder), table["on"])
    return made


def failure(name: str, client: str, error: Exception) -> FedalignError:
    """Say at which client a metric failed, and how."""
    if isinstance(error, FedalignError):
        return error
    return FedalignError(
        f"the metric {name!r} fails on the samples of {client}: {in_words(error)}; "
        "where it is undefined it may return NaN"
    )


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not name or any(c in name for c in " \t\n;:()=,\"'"):
        raise FedalignError(f"a metric's name must be one word, not {name!r}")
    return name
