"""Asks clients over the Grid for the metrics of a round's model. Nothing but numbers leaves a client."""

from __future__ import annotations

import logging

import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedalign.flower.exchange import Exchange
from fedalign.flower.members import Members
from fedalign.flower.settings import Settings
from fedalign.flower.shipping import Order, Shipping
from fedalign.flower.wire import LARGEST, MEASURE, number, put_task
from fedalign.metrics.measuring import weighted
from fedalign.metrics.metric import Metric
from fedalign.protocol.messages import Lost
from fedalign.protocol.metric_values import MetricValues
from fedalign.rules.rule import Split

log = logging.getLogger("flwr")
_MOST_NAMES = 10_000  # of a round
_MOST_FREE_NAMES = 200  # of a run, that only free clients reported: strangers must not fill memory and the report


def split_over_flower(metric: Metric) -> Split:
    """Return the data that a client computes a metric on: its test data, unless the metric says otherwise."""
    return "test" if metric.on == "auto" else metric.on


class ClientMetrics:
    """Collects metrics after every round, in an exchange of its own with all connected clients.

    There are no pooled figures: outputs stay with the clients. What free clients report is not verified.
    """

    def __init__(self, settings: Settings, exchange: Exchange, shipping: Shipping, members: Members) -> None:
        self._metrics, self._rounds = settings.make_metrics(), settings.rounds
        self._exchange, self._shipping, self._members = exchange, shipping, members
        self._free_names: set[str] = set()  # of values that only free clients have reported

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def measure(self, model: torch.Tensor) -> dict[str, MetricValues]:
        """Let all connected clients measure a model. A client that does not answer is reported and has no values."""
        orders = {k: self._question(k, model) for k in self._exchange.nodes if self._members.has_reported(k)}
        found: dict[int, dict[str, float]] = {}
        for k, answer in self._shipping(MEASURE, orders, "metrics").items():
            if isinstance(answer, Lost):
                log.warning("%s sent no metrics: %s", self._members.name(k), answer.reason)
            else:
                found[k] = self._read(answer)
        roster = self._members.roster()
        values: dict[str, MetricValues] = {}
        for key in self._names(found):
            each = tuple(found.get(k, {}).get(key) for k in range(len(roster)))
            priority, free = (weighted(each, roster, priority=is_priority) for is_priority in (True, False))
            metric = next(metric for name, metric in self._metrics.items() if _belongs(key, name))
            values[key] = MetricValues(priority, free, clients=each, split=split_over_flower(metric))
        return values

    def _question(self, k: int, model: torch.Tensor) -> Order:
        content = RecordDict()
        put_task(content, k, 0, self._rounds, "test", self._members.is_priority(k), None)
        task = content["task"]
        assert isinstance(task, ConfigRecord)
        task["metrics"] = True
        return Order([model], content)

    def _read(self, answer: RecordDict) -> dict[str, float]:
        """Take the numbers of an answer that have the name of a metric, or of a value of one.

        Those that are not finite, or that no metric has, are left out.
        """
        record = answer.get("metrics")
        if not isinstance(record, MetricRecord):
            return {}
        numbers = {key: number(value) for key, value in record.items()}
        return {
            key: value
            for key, value in numbers.items()
            if value is not None and abs(value) <= LARGEST and any(_belongs(key, name) for name in self._metrics)
        }

    def _names(self, found: dict[int, dict[str, float]]) -> list[str]:
        """Return the names of all values, those of priority clients first: a metric may have one for every class.

        Names that are too many are dropped. Free clients may add a few of their own in a run, such as that of a class
        that no priority client has.
        """
        names = dict.fromkeys(key for k in found if self._members.is_priority(k) for key in found[k])
        others = dict.fromkeys(key for of_client in found.values() for key in of_client if key not in names)
        new = [key for key in others if key not in self._free_names]
        taken = new[: _MOST_FREE_NAMES - len(self._free_names)]
        self._free_names.update(taken)
        kept = [*names, *(key for key in others if key in self._free_names)][:_MOST_NAMES]
        if dropped := len(names) + len(others) - len(kept):
            log.warning("clients sent %d values with names of their own; %d are left out", len(new), dropped)
        return kept


def _belongs(key: str, name: str) -> bool:
    """Say whether a value is that of a metric, or one of its several values.

    >>> _belongs("recall.0", "recall"), _belongs("recall2", "recall")
    (True, False)
    """
    return key == name or key.startswith(f"{name}.")
