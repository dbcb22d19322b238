"""Columns by name: which of them are targets, and which are features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedalign.errors import FedalignError, nearest


@dataclass(frozen=True)
class Columns:
    """The names of a table's columns, and what the table is called in error messages."""

    names: Sequence[str]
    what: str

    def check(self, name: str) -> str:
        """Return a name; raises :class:`FedalignError` if no column has it.

        >>> Columns(["age", "ill"], "a.csv").check("Age")
        Traceback (most recent call last):
        fedalign.errors.FedalignError: a.csv has no column 'Age'; did you mean 'age'?
        """
        if name not in self.names:
            raise FedalignError(f"{self.what} has no column {name!r}; {nearest(name, self.names)}")
        return name


def targets(columns: Columns, target: str | Sequence[str] | None) -> list[str]:
    """List the target columns; raises :class:`FedalignError` if none is named, or if one does not exist."""
    if not target:
        known = ", ".join(columns.names)
        raise FedalignError(f"{columns.what} needs a target: name its column, as in target = 'label'; known: {known}")
    return [columns.check(name) for name in ([target] if isinstance(target, str) else target)]


def feature_names(columns: Columns, targets: Sequence[str], features: Sequence[str] | str | None) -> list[str]:
    """List the feature columns: those that are named, or all but the targets.

    >>> feature_names(Columns(["age", "weight", "ill"], "a.csv"), ["ill"], None)
    ['age', 'weight']
    """
    if features is None:
        found = [name for name in columns.names if name not in targets]
    else:
        found = [columns.check(name) for name in ([features] if isinstance(features, str) else features)]
        both = [name for name in found if name in targets]
        if both:
            raise FedalignError(f"{columns.what}: column {both[0]!r} is a target and cannot be a feature, too")
    if not found:
        raise FedalignError(f"{columns.what} has no columns to train on besides its target")
    return found
