"""The aggregator that follows a step such as bucketing, by name or as an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedalign.aggregation.aggregator import Aggregator
from fedalign.errors import FedalignError
from fedalign.registry import AGGREGATORS


def next_aggregator(then: Aggregator | str | Mapping[str, Any] | None) -> Aggregator | None:
    """Make the aggregator that the option ``then`` names; an object or None is returned as it is.

    Raises :class:`FedalignError` for an unknown name, a wrong option or an object of another kind.

    >>> next_aggregator("trimmed-mean(trim=2)")
    TrimmedMean(trim=2.0)
    """
    made = AGGREGATORS.accept("then", then)
    if made is not None and not isinstance(made, Aggregator):
        raise FedalignError(f"then must be a fedalign.Aggregator object or its name, not {then!r}")
    return made
