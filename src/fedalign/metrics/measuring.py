"""Measures metrics of the model that a round serves, on every client's own data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence

from fedalign.errors import FedalignError
from fedalign.metrics.metric import Metric, Samples, failure
from fedalign.protocol.metric_values import MetricValues
from fedalign.protocol.roster import Roster

_MOST_POOLED = 1 << 27  # numbers in the outputs that are pooled at once for a function


def metric_values(
    metrics: Mapping[str, Metric],
    samples: Mapping[str, Mapping[int, Samples]],
    roster: Roster,
    splits: Mapping[str, str],
    *,
    pooled: bool = True,
) -> dict[str, MetricValues]:
    """Compute metrics of every client and of both groups.

    ``samples`` holds outputs and targets by split and client, ``splits`` the split of every metric. Pooled figures are
    left out without ``pooled``, as where every client has a model of its own. Raises :class:`FedalignError`, which
    names the metric and the client, if a metric fails.
    """
    found: dict[str, MetricValues] = {}
    for name, metric in metrics.items():
        split = splits[name]
        own = samples[split]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries warn of classes without samples, in every round
            each = {k: _computed(name, metric, [own[k]], f"client {roster.names[k]!r}") for k in own}
            together = {
                is_priority: _pooled(name, metric, [own[k] for k in own if roster.priority[k] == is_priority])
                if pooled
                else {}
                for is_priority in (True, False)
            }
        for key in dict.fromkeys(key for of_client in each.values() for key in of_client):
            values = tuple(each[k].get(key) if k in each else None for k in range(len(roster)))
            found[key] = MetricValues(
                weighted(values, roster, priority=True),
                weighted(values, roster, priority=False),
                together[True].get(key),
                together[False].get(key),
                values,
                split,
            )
    return found


def _computed(name: str, metric: Metric, parts: Sequence[Samples], whose: str) -> dict[str, float | None]:
    try:
        return metric.compute(name, parts)
    except Exception as error:
        raise failure(name, whose, error) from error


def _pooled(name: str, metric: Metric, parts: Sequence[Samples]) -> dict[str, float | None]:
    if not metric.accumulates and sum(outputs.numel() for outputs, _ in parts) > _MOST_POOLED:
        return {}
    return _computed(name, metric, parts, "several clients")


def weighted(values: Sequence[float | None], roster: Roster, *, priority: bool) -> float | None:
    """Average the known values of the priority clients, or of the free clients, by the clients' sample counts.

    >>> weighted([1.0, 0.5, None], Roster(("a", "b", "c"), (True, True, False), (30, 10, 20)), priority=True)
    0.875
    """
    known = [(float(roster.p[k]), v) for k, v in enumerate(values) if v is not None and roster.priority[k] == priority]
    total = math.fsum(weight for weight, _ in known)
    return math.fsum(weight * value for weight, value in known) / total if total else None


def splits_of(metrics: Mapping[str, Metric], available: Iterable[str]) -> dict[str, str]:
    """Choose the data of every metric. ``available`` are the splits that some priority client has.

    Raises :class:`FedalignError` if a metric asks for data that no priority client has.
    """
    has = list(available)
    usual = next(split for split in ("test", "heldout", "train") if split in has)
    for name, metric in metrics.items():
        if metric.on not in ("auto", *has):
            raise FedalignError(
                f"the metric {name!r} is measured on {metric.on} data, but no priority client has any; use on={usual!r}"
            )
    return {name: usual if metric.on == "auto" else metric.on for name, metric in metrics.items()}
