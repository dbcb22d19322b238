"""Schedules of the user's own, ``{schedule = "module:Name"}``: functions of the round, subclasses of ``Schedule``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.settings import user_modules
from fedalign.training.schedules import Schedule


def own_schedule(
    table: Mapping[str, Any], what: str, folder: Path | None = None
) -> Schedule | Callable[[int], float] | None:
    """Make the schedule that a table names as ``module:Name``; None if it names a built-in one.

    A class gets the table's other keys as arguments, and so does a function, after the round. Raises
    :class:`FedalignError` if there is no such class or function, or if it does not take the arguments.

    >>> own_schedule({"schedule": "math:sqrt"}, "epsilon")(4)
    2.0
    """
    name = table.get("schedule")
    if not isinstance(name, str) or ":" not in name:
        return None
    try:
        found = user_modules.find(name, folder)
    except FedalignError as error:
        raise FedalignError(f"{what}: the schedule is {name!r}, but {error}") from error
    options = {key: value for key, value in table.items() if key != "schedule"}
    if inspect.isclass(found) and issubclass(found, Schedule):
        try:
            made: Schedule = found(**options)
        except TypeError as error:
            raise FedalignError(f"{what}: cannot make the schedule {name!r}: {error}") from error
        return made
    if inspect.isclass(found) or not callable(found):
        raise FedalignError(f"{what}: {name!r} must be a function of the round, or a subclass of fedalign.Schedule")
    return functools.partial(found, **options) if options else found
