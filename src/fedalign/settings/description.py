"""Python objects as settings: the table that makes an equal object, where there is one."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.settings import user_modules
from fedalign.settings.fingerprint import fingerprint
from fedalign.settings.lookup import Registry
from fedalign.settings.typed_values import parts
from fedalign.settings.validation import options_of
from fedalign.training.schedules import BY_NAME, FromCallable, Schedule

_NOTHING = object()


def describe(registry: Registry, given: Any, folder: Path | None = None) -> dict[str, Any] | None:
    """Return the table that a settings file would have for an object, a class or a function; None if there is none.

    There is one if the class is built in or can be imported by others, and if its options can be read from the object
    and written into a file. What the table makes equals the object.

    >>> from fedalign.registry import PARTICIPATION
    >>> from fedalign.training.participation import Bernoulli
    >>> describe(PARTICIPATION, Bernoulli(0.5))
    {'kind': 'bernoulli', 'p': 0.5}
    >>> describe(PARTICIPATION, lambda: Bernoulli(0.5)) is None
    True
    """
    if isinstance(given, functools.partial):
        return _with_options(registry, given.func, _keywords(given), folder)
    if inspect.isclass(given) or inspect.isroutine(given):
        return _with_options(registry, given, {}, folder)
    options = options_from(given)
    table = None if options is None else _with_options(registry, type(given), options, folder)
    if table is None:
        return None
    try:
        made = registry.make(registry.resolve("it", table, folder), folder)
    except FedalignError:
        return None
    return table if same(made, given) else None


def options_from(given: Any) -> dict[str, Any] | None:
    """Read an object's options from its attributes; None if one has no attribute or no form in a file."""
    found = {}
    for name, option in options_of(type(given)).items():
        value = getattr(given, name, _NOTHING)
        if value is _NOTHING:
            return None
        if name == "**" or (value is None and option.default is None):
            continue
        is_schedule = inspect.isroutine(value) and Schedule in parts(option.annotation)
        plain = function_as_schedule(value) if is_schedule else as_setting(value)
        if plain is _NOTHING:
            return None
        found[name] = plain
    return found


def as_setting(value: Any) -> Any:
    """Return a value as a settings file holds it; an object of this module's own if a file cannot hold it.

    >>> from fedalign.training.schedules import Linear
    >>> as_setting(Linear(0.5, 0.1))
    {'schedule': 'linear', 'start': 0.5, 'end': 0.1}
    """
    if value is None:
        return False
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        items = [as_setting(item) for item in value]
        return _NOTHING if any(item is _NOTHING for item in items) else items
    if isinstance(value, Schedule):
        return _schedule(value)
    return _NOTHING


def function_as_schedule(function: Any) -> Any:
    """Return the table of a function of the round that others can import; see :func:`as_setting`."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        return _NOTHING
    return {"schedule": f"{module}:{name}"}


def is_setting(value: Any) -> bool:
    """Tell whether a settings file can hold what :func:`as_setting` returned."""
    return value is not _NOTHING


def name_of(registry: Registry, given: Callable[..., Any], folder: Path | None = None) -> str | None:
    """Return the built-in name of a class or function, or ``module:Name`` if others can import it, or None."""
    for name in registry.entries:
        reference = registry.entries[name][0]
        if given.__name__ == reference.partition(":")[2] and registry.find(name) is given:
            return name
    module, name = given.__module__, given.__qualname__
    if module in (None, "__main__") or not name.isidentifier() or module not in sys.modules:
        return None
    try:
        found = user_modules.find(f"{module}:{name}", folder)
    except FedalignError:
        return None
    return f"{module}:{name}" if found is given else None


def same(one: Any, other: Any) -> bool:
    """Tell whether two objects are equal, also where their class, or that of a part, does not say what that means."""
    return type(one) is type(other) and (bool(one == other) or fingerprint(one) == fingerprint(other))


def _with_options(
    registry: Registry, make: Callable[..., Any], options: Mapping[str, Any] | None, folder: Path | None
) -> dict[str, Any] | None:
    name = None if options is None else name_of(registry, make, folder)
    return None if name is None or options is None else {"kind": name, **options}


def _keywords(given: functools.partial[Any]) -> dict[str, Any] | None:
    """Return the arguments of a partial by name, as settings."""
    try:
        bound = inspect.signature(given.func).bind_partial(*given.args, **given.keywords).arguments
    except (TypeError, ValueError):
        return None
    plain = {name: as_setting(value) for name, value in bound.items()}
    return None if any(value is _NOTHING for value in plain.values()) else plain


def _schedule(value: Schedule) -> Any:
    name = next((name for name, kind in BY_NAME.items() if type(value) is kind), None)
    if name is None or isinstance(value, FromCallable):
        return _NOTHING
    fields = dataclasses.fields(value)  # type: ignore[arg-type]
    given = {field.name: as_setting(getattr(value, field.name)) for field in fields}
    return {"schedule": name, **{key: item for key, item in given.items() if item is not False}}
