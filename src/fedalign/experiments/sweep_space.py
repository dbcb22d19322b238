"""The settings that a sweep varies: values separated by commas, or a range for Optuna."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedalign.errors import FedalignError
from fedalign.settings.notation import read_value, split_values

Point = dict[str, Any]  # by key of the settings: the value there
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(\w+))?")
_INSTEAD = {"seeds": "every point has all seeds: use --seeds", "arms": "every point has all arms: use --arms"}
_FIXED = ("name", "description", "device", "tf32", "trackers", "theory")


@dataclass(frozen=True)
class Choice:
    """A key with the values to try."""

    key: str
    values: tuple[Any, ...]

    @property
    def first(self) -> Any:
        """The value that stands for the axis where only one point is looked at."""
        return self.values[0]

    def __str__(self) -> str:
        return ",".join(shown(value) for value in self.values)


@dataclass(frozen=True)
class Range:
    """A key with the ends of its values; ``whole`` for whole numbers, ``log`` for a logarithmic scale."""

    key: str
    low: float
    high: float
    whole: bool = False
    log: bool = False

    @property
    def first(self) -> float:
        """The lower end, which stands for the axis where only one point is looked at."""
        return int(self.low) if self.whole else self.low

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}{':log' if self.log else ''}"


def read_axes(pairs: Sequence[str]) -> tuple[dict[str, Any], list[Choice | Range]]:
    """Read ``KEY=VALUE`` settings: those with one value, which are the same at all points, and those that vary.

    Raises :class:`FedalignError` for keys that cannot vary, values that are given twice, and ranges without an inside.

    >>> read_axes(["rounds=20", "epsilon=0.1,0.2", "local.lr=0.01..0.3:log"])
    ({'rounds': 20}, [Choice(key='epsilon', values=(0.1, 0.2)), Range(key='local.lr', low=0.01, high=0.3, whole=False, \
log=True)])
    """
    fixed: dict[str, Any] = {}
    axes: list[Choice | Range] = []
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise FedalignError(f"--set takes KEY=VALUE,VALUE, as in --set local.lr=0.05,0.1, not {pair!r}")
        if key in fixed or any(axis.key == key for axis in axes):
            raise FedalignError(f"{key} is set twice; give all its values at once, as in --set {key}=A,B")
        axis = _axis(key, text)
        if isinstance(axis, Choice) and len(axis.values) == 1:
            fixed[key] = axis.values[0]
            continue
        if key in _INSTEAD or key in _FIXED:
            raise FedalignError(f"{key} cannot vary in a sweep; {_INSTEAD.get(key, 'give it one value, in quotes')}")
        axes.append(axis)
    return fixed, axes


def _axis(key: str, text: str) -> Choice | Range:
    found = _RANGE.fullmatch(text)
    if found is not None:
        return _range(key, text, *found.groups())
    if ".." in text and re.fullmatch(r"[\d.eE+:\w-]*", text):
        raise FedalignError(f"cannot read the range {key}={text}; write it as 0.01..0.3 or 0.01..0.3:log")
    try:
        values = [read_value(part) for part in split_values(text)] if text else [""]
    except FedalignError as error:
        raise FedalignError(f"--set {key}: {error}") from error
    if len({shown(value) for value in values}) < len(values):
        raise FedalignError(f"--set {key}={text} has a value twice")
    return Choice(key, tuple(values))


def _range(key: str, text: str, low: str, high: str, scale: str | None) -> Range:
    ends = read_value(low), read_value(high)
    whole = all(isinstance(end, int) for end in ends)
    try:
        first, last = (float(end) for end in ends)
    except ValueError as error:
        raise FedalignError(f"cannot read the range {key}={text}; write numbers as 0.01..0.3") from error
    if scale not in (None, "log"):
        raise FedalignError(f"cannot read the range {key}={text}; after the colon there may only be log")
    if not first < last or (scale and first <= 0):
        raise FedalignError(
            f"the range {key}={text} must have its lower end first{', above 0 for a logarithmic scale' * bool(scale)}"
        )
    return Range(key, first, last, whole, scale == "log")


def grid(axes: Sequence[Choice | Range]) -> list[Point]:
    """List all combinations of values, the last key varying fastest.

    >>> grid([Choice("a", (1, 2)), Choice("b", (3, 4))])[:2]
    [{'a': 1, 'b': 3}, {'a': 1, 'b': 4}]
    """
    for axis in axes:
        if isinstance(axis, Range):
            raise FedalignError(
                f"{axis.key}={axis} is a range, which needs --optuna N for so many points; or give values, as 0.1,0.2"
            )
    if not axes:
        raise FedalignError("a sweep varies at least one setting, as in --set epsilon=0.1,0.2,0.4")
    values = [axis.values for axis in axes if isinstance(axis, Choice)]
    return [dict(zip((axis.key for axis in axes), chosen, strict=True)) for chosen in itertools.product(*values)]


def shown(value: Any) -> str:
    """Write a value as the command line takes it.

    >>> shown(0.05), shown([200, 200]), shown("loss"), shown(True)
    ('0.05', '[200, 200]', 'loss', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_quoted(entry)}" for key, entry in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else shown(value)


def label(point: Point) -> str:
    """Name a point.

    >>> label({"epsilon": 0.1, "local.lr": 0.05})
    'epsilon=0.1, local.lr=0.05'
    """
    return ", ".join(f"{key}={shown(value)}" for key, value in point.items())
