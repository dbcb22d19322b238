"""Single values from settings files, checked and converted by cattrs to what a Python annotation asks for.

Checks are strict: ``"5"`` is not a whole number, ``true`` is not ``1``, and only a whole number may stand for a
number.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cattrs

from fedalign.errors import FedalignError
from fedalign.training.schedules import Schedule

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a text"}


class UnfitError(ValueError):
    """A value that does not fit an annotation: ``value`` is what came, ``wanted`` says what would be right.

    ``depth`` counts the lists around the value.
    """

    def __init__(self, value: Any, wanted: str, depth: int = 0) -> None:
        super().__init__(f"must be {wanted}, not {value!r}")
        self.value, self.wanted, self.depth = value, wanted, depth


def check_type(key: str, value: Any, annotation: Any) -> Any:
    """Convert a setting's value to the type that an annotation asks for.

    A whole number becomes a float where only floats fit. ``false`` stands for None where None fits and a bool does
    not, because TOML has no null. Raises :class:`FedalignError`, which names the key and what would be right.

    >>> check_type("local.lr", 1, float)
    1.0
    >>> check_type("rounds", 1.5, int)
    Traceback (most recent call last):
    fedalign.errors.FedalignError: rounds must be a whole number, not 1.5
    """
    try:
        return _converter.structure(value, annotation)
    except UnfitError as error:
        name = "an entry of " * error.depth + key
        raise FedalignError(f"{name} must be {error.wanted}, not {error.value!r}") from error


def parts(annotation: Any) -> list[Any]:
    """Split a union into its members; anything else is its own only member."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return [part for member in typing.get_args(annotation) for part in parts(member)]
    return [annotation]


def _is_open(annotation: Any) -> bool:
    """Tell whether an annotation says nothing: none at all, Any, or a text that could not be resolved."""
    return annotation in (inspect.Parameter.empty, Any, object) or isinstance(annotation, str)


def _is_sequence(annotation: Any) -> bool:
    return (typing.get_origin(annotation) or annotation) in (list, tuple, Sequence)


def _is_table(annotation: Any) -> bool:
    return (typing.get_origin(annotation) or annotation) in (dict, Mapping, Schedule)


def _is_simple(annotation: Any) -> bool:
    return annotation in _WORDS


def _is_literal(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.Literal


def holdable(annotation: Any) -> bool:
    """Tell whether a settings file can hold a value of this type."""
    tests = (_is_open, _is_simple, _is_sequence, _is_table, _is_literal)
    return any(test(part) for part in parts(annotation) for test in tests)


def _structure_simple(value: Any, annotation: Any) -> Any:
    if annotation is float and type(value) in (int, float):
        return float(value)
    if annotation is Path and isinstance(value, str | Path):
        return Path(value)
    if type(value) is not annotation:
        raise UnfitError(value, _WORDS[annotation])
    return value


def _structure_literal(value: Any, annotation: Any) -> Any:
    options = typing.get_args(annotation)
    if not any(type(value) is type(option) and value == option for option in options):
        *others, last = (repr(option) for option in options)
        raise UnfitError(value, f"{', '.join(others)} or {last}" if others else last)
    return value


def _structure_table(value: Any, annotation: Any) -> Any:
    if not isinstance(value, Mapping | Schedule):
        raise UnfitError(value, "a schedule" if annotation is Schedule else "a table")
    return value


def _structure_sequence(value: Any, annotation: Any) -> Any:
    is_tuple = (typing.get_origin(annotation) or annotation) is tuple
    items = typing.get_args(annotation) or (Any, ...)
    if not isinstance(value, list | tuple):
        raise UnfitError(value, "a list")
    if is_tuple and items[-1] is not Ellipsis:
        if len(value) != len(items):
            raise UnfitError(value, f"a list of {len(items)}")
    else:
        items = (items[0],) * len(value)
    found = []
    for entry, item in zip(value, items, strict=True):
        try:
            found.append(_converter.structure(entry, item))
        except UnfitError as error:
            raise UnfitError(error.value, error.wanted, error.depth + 1) from error
    return tuple(found) if is_tuple else found


def _structure_union(value: Any, annotation: Any) -> Any:
    """Take the first member that fits; the error names all that a settings file could hold."""
    members = parts(annotation)
    if value is None and type(None) in members:
        return None
    if value is False and type(None) in members and bool not in members:
        return None
    wanted: list[str] = []
    for member in members:
        if not holdable(member):
            continue
        try:
            return _converter.structure(value, member)
        except UnfitError as error:
            if error.depth:  # it is a list, but an entry of it does not fit
                raise
            wanted.append(error.wanted)
    raise UnfitError(value, " or ".join(dict.fromkeys(wanted)))


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    for simple in _WORDS:
        converter.register_structure_hook(simple, _structure_simple)
    for test, structure in (
        (_is_literal, _structure_literal),
        (_is_sequence, _structure_sequence),
        (_is_table, _structure_table),
        (lambda annotation: len(parts(annotation)) > 1, _structure_union),
        (lambda annotation: not holdable(annotation) or _is_open(annotation), lambda value, annotation: value),
    ):
        converter.register_structure_hook_func(test, structure)
    return converter


_converter = _make_converter()
