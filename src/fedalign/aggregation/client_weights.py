"""The base of aggregators that give every client a weight by the trainable part of its model."""

from __future__ import annotations

import abc

import torch

from fedalign.aggregation.aggregator import AggregateContext, ContextAggregator
from fedalign.aggregation.rows import weighted_sum


class ClientWeights(ContextAggregator):
    """Gives clients weights, and sums their whole models with them. Subclass it and define :meth:`weights`.

    Distances between whole models would count statistics such as BatchNorm's, which may be large. So the weights come
    from the trainable part alone; they are applied to everything, so that weights and statistics fit together.
    """

    @abc.abstractmethod
    def weights(self, vectors: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Return the clients' weights, which sum to 1, by the trainable parts of their models (clients × numbers).

        ``start`` is the trainable part of the model that they received.
        """

    def combine_in(self, models: torch.Tensor, shares: torch.Tensor, context: AggregateContext) -> torch.Tensor:
        """Return the weighted sum of whole models."""
        trainable, start = models[:, : context.size], context.received[: context.size]
        return weighted_sum(models, self.weights(trainable, start))
