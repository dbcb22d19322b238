"""The metrics of a simulated run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedalign.data.federation import Federation
from fedalign.metrics.measuring import metric_values, splits_of
from fedalign.metrics.metric import Metric, Samples
from fedalign.protocol.metric_values import MetricValues
from fedalign.rules.rule import Split
from fedalign.simulation.engine.outputs import OutputReader

_SPLITS: tuple[Split, ...] = ("test", "heldout", "train")


@dataclass(frozen=True)
class RunMetrics:
    """Measures a run's metrics. The clients' own data counts, also of those that are hostile."""

    metrics: Mapping[str, Metric]
    federation: Federation
    reader: OutputReader

    def of(self, model: torch.Tensor | tuple[torch.Tensor, ...]) -> dict[str, MetricValues]:
        """Measure the served model, or the clients' own models, on every client's data."""
        splits = self.splits()
        clients = range(len(self.federation))
        models = {k: model[k] if isinstance(model, tuple) else model for k in clients}
        samples: dict[str, dict[int, Samples]] = {}
        for split in _SPLITS:
            if split in splits.values():
                rows = {k: self.federation.clients[k].rows(split) for k in clients}
                samples[split] = self.reader.read(
                    models, self.federation.pool, {k: r for k, r in rows.items() if len(r)}
                )
        pooled = not isinstance(model, tuple)  # scores of different models are not comparable
        return metric_values(self.metrics, samples, self.federation.roster, splits, pooled=pooled)

    def splits(self) -> dict[str, str]:
        """Return the data of every metric; raises :class:`FedalignError` for data that the priority clients lack."""
        priority = [client for client in self.federation.clients if client.priority]
        return splits_of(self.metrics, [split for split in _SPLITS if any(len(c.rows(split)) for c in priority)])


def prepare_metrics(
    runs: Sequence[tuple[Mapping[str, Metric], Federation]], reader: OutputReader, initial: torch.Tensor
) -> list[RunMetrics | None]:
    """Make the metrics of every run, and measure an initial model: a metric that fails is refused before any work.

    Raises :class:`FedalignError`, which names the metric and what is wrong.
    """
    tried: set[tuple[int, int]] = set()
    made: list[RunMetrics | None] = []
    for metrics, federation in runs:
        made.append(RunMetrics(metrics, federation, reader) if metrics else None)
        if metrics and (id(metrics), id(federation)) not in tried:
            tried.add((id(metrics), id(federation)))
            RunMetrics(metrics, federation, reader).of(initial.to(reader.device))
    return made
