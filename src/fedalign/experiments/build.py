"""From a table of settings to an object, with an error that names the key and what would be right.

Keys, types and defaults are those of the constructor, so there is nothing to keep in step.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fedalign.errors import FedalignError, nearest
from fedalign.training.schedules import Schedule

T = TypeVar("T")
_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a schedule",
}


def settings_of(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """List what a constructor takes, with types resolved."""
    return dict(inspect.signature(make, eval_str=True).parameters)


def resolve(section: str, table: Mapping[str, Any], kinds: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Check a section with a ``kind``, and give it with all defaults filled in."""
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise FedalignError(f"{section}.kind is {kind!r}; {nearest(str(kind), kinds)}")
    given = {key: value for key, value in table.items() if key != "kind"}
    return {"kind": kind, **check(section, given, kinds[kind])}


def check(section: str, table: Mapping[str, Any], make: Callable[..., Any]) -> dict[str, Any]:
    """Check a table's keys and types against a constructor, and fill in its defaults (none that are None)."""
    known = settings_of(make)
    filled: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise FedalignError(f"unknown key {section}.{key}; {nearest(key, known)}")
        filled[key] = check_type(f"{section}.{key}", value, known[key].annotation)
    for key, parameter in known.items():
        if key not in filled:
            if parameter.default is inspect.Parameter.empty:
                raise FedalignError(f"{section}.{key} is missing")
            if parameter.default is not None:
                filled[key] = parameter.default
    return {key: filled[key] for key in known if key in filled}


def construct(table: Mapping[str, Any], kinds: Mapping[str, Callable[..., T]]) -> T:
    """Make the object that a resolved section describes."""
    return kinds[table["kind"]](**{key: value for key, value in table.items() if key != "kind"})


def check_type(key: str, value: Any, annotation: Any) -> Any:
    """Give a value in the type that is wanted, or say what would be right."""
    wanted = _alternatives(annotation)
    for kind in wanted:
        if kind is dict and isinstance(value, Mapping):
            return value
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return value if int in wanted else float(value)
        if kind in (int, bool, str) and type(value) is kind:
            return value
        if isinstance(kind, tuple) and isinstance(value, list | tuple):
            return [check_type(f"an entry of {key}", item, kind[1]) for item in value]
    names = [_NAMES[list] if isinstance(kind, tuple) else _NAMES[kind] for kind in wanted]
    raise FedalignError(f"{key} must be {' or '.join(dict.fromkeys(names))}, not {value!r}")


def _alternatives(annotation: Any) -> list[Any]:
    """Break a type into those that a TOML value can have; a schedule is a table."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return [kind for part in typing.get_args(annotation) for kind in _alternatives(part)]
    origin = typing.get_origin(annotation) or annotation
    if origin in (bool, int, float, str):
        return [origin]
    if origin is typing.Literal:
        return [str]
    if origin is Schedule:
        return [dict]
    if origin in (list, Sequence):
        return [(list, (*typing.get_args(annotation), str)[0])]
    return []
