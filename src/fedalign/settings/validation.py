"""Tables of options, checked against the signature of the class or function that takes them.

What a constructor takes is read from its signature, so a new option is declared in one place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError, nearest
from fedalign.settings.own_schedules import own_schedule
from fedalign.settings.typed_values import check_type, holdable, parts
from fedalign.training.schedules import Schedule, as_schedule

_EMPTY = inspect.Parameter.empty


def options_of(make: Callable[..., Any], given: int = 0) -> dict[str, inspect.Parameter]:
    """List the parameters of a class or function that settings can give, with their annotations resolved.

    Leaves out the first ``given`` parameters, which the program passes, and optional ones whose type no settings file
    can hold. A parameter that collects further keywords is listed under the name ``**``.

    >>> def net(inputs: int, hidden: int = 8): ...
    >>> {name: option.annotation.__name__ for name, option in options_of(net).items()}
    {'inputs': 'int', 'hidden': 'int'}
    """
    try:
        signature = inspect.signature(make, eval_str=True)
    except NameError:  # an annotation that exists for type checkers alone
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # some classes written in C have no signature
        return {}
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in list(signature.parameters.items())[given:]:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found["**"] = parameter
        elif parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY) and (
            parameter.default is _EMPTY or holdable(parameter.annotation)
        ):
            found[name] = parameter
    return found


def check_options(section: str, table: Mapping[str, Any], make: Callable[..., Any], given: int = 0) -> dict[str, Any]:
    """Check a table of options against a signature, and return it as TOML can hold it, with the defaults filled in.

    Defaults of None are left out. Raises :class:`FedalignError` for an unknown key, a missing one or a wrong type.

    >>> def net(inputs: int, hidden: int = 8): ...
    >>> check_options("model", {"inputs": 4}, net)
    {'inputs': 4, 'hidden': 8}
    >>> check_options("model", {"input": 4}, net)
    Traceback (most recent call last):
    fedalign.errors.FedalignError: unknown key model.input; did you mean 'inputs'?
    """
    known = options_of(make, given)
    checked = check_given(section, table, known)
    for key, option in known.items():
        if key not in checked and key != "**":
            if option.default is _EMPTY:
                raise FedalignError(f"{section}.{key} is missing")
            if option.default is not None and _is_toml(option.default):
                checked[key] = _plain(option.default)
    order = [*known, *(key for key in checked if key not in known)]
    return {key: checked[key] for key in order if key in checked}


def check_given(section: str, table: Mapping[str, Any], known: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Check the options of a table alone, without defaults; the result is again what TOML can hold."""
    checked = {}
    for key, value in table.items():
        if key in known:
            checked[key] = _plain(check_type(f"{section}.{key}", value, known[key].annotation))
        elif "**" in known:
            checked[key] = value
        else:
            raise FedalignError(f"unknown key {section}.{key}; {nearest(key, known)}")
    return checked


def arguments(
    table: Mapping[str, Any], known: Mapping[str, inspect.Parameter], folder: Path | None = None
) -> dict[str, Any]:
    """Turn checked options into Python arguments: tuples, paths, None for ``false`` and schedules for their tables.

    Users' own schedules (``schedule = "module:Name"``) are looked for in ``folder`` first.
    """
    made = {}
    for key, value in table.items():
        annotation = known[key].annotation if key in known else Any
        made[key] = check_type(key, value, annotation)
        if isinstance(value, Mapping) and Schedule in parts(annotation):
            made[key] = own_schedule(value, key, folder) or as_schedule(value, key)
    return made


def _plain(value: Any) -> Any:
    """Give a value as TOML holds it: lists, texts, and ``false`` for None."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return False if value is None else value


def _is_toml(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_toml(item) for item in value)
    return isinstance(value, bool | int | float | str | Path)
