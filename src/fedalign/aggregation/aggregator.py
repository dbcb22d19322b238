"""The server's aggregators, as settings name them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightedMean:
    """The weighted mean of the clients' models, as in FedAvg: ``Σ p_k w_k / Σ p_k``."""
