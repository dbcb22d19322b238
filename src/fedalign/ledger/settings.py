"""The section ``[ledger]`` of settings: the method with its options, and the ledger's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError, nearest
from fedalign.ledger.ledger import Ledger
from fedalign.ledger.valuation import Valuation
from fedalign.registry import VALUATIONS
from fedalign.settings.validation import check_options, options_of

USUAL = "gtg-shapley"  #: the method unless another one is named


def resolve_ledger(given: Any, folder: Path | None = None) -> dict[str, Any]:
    """Check the section, given as a table, as the text of a method, or as ``true``, and fill in every default.

    Raises :class:`FedalignError` for an unknown method, an unknown option or a value of the wrong type.

    >>> resolve_ledger("exact(most=8)")
    {'method': 'exact', 'most': 8, 'copies': 0.999, 'calibrated': True, 'priority': True}
    >>> resolve_ledger({"permutation": 3})
    Traceback (most recent call last):
    fedalign.errors.FedalignError: unknown key ledger.permutation; did you mean 'permutations'?
    """
    table = {"method": USUAL} if given is True else {"method": USUAL, **given} if isinstance(given, Mapping) else given
    where, name, options = VALUATIONS.split("ledger", table, "method")
    make = VALUATIONS.find(name, folder, where)
    own, known = _own(), options_of(make)
    for key in options:
        if key not in own and key not in known and "**" not in known:
            raise FedalignError(f"unknown key ledger.{key}; {nearest(key, [*known, *own])}")
    mine = check_options("ledger", {key: value for key, value in options.items() if key in own}, Ledger)
    rest = {key: value for key, value in options.items() if key not in own}
    return {"method": name, **check_options("ledger", rest, make), **{key: mine[key] for key in own if key in mine}}


def make_ledger(table: Mapping[str, Any], folder: Path | None = None) -> Ledger:
    """Make the ledger that a checked section describes.

    >>> make_ledger(resolve_ledger("leave-one-out")).method_name
    'leave-one-out'
    """
    own = _own()
    options = {key: value for key, value in table.items() if key not in own and key != "method"}
    method = VALUATIONS.make({"kind": table["method"], **options}, folder)
    mine = {key: value for key, value in table.items() if key in own}
    if "key" in mine:
        path = Path(mine["key"]).expanduser()
        mine["key"] = path if folder is None else folder / path
    return Ledger(method, **mine)


def as_ledger(given: Any) -> Ledger | None:
    """Return a ledger, given as one, as a method, or as settings have it; None and False: none is kept.

    >>> as_ledger("exact").method
    ExactShapley(most=10)
    """
    if given is None or given is False:
        return None
    if isinstance(given, Ledger):
        return given
    if isinstance(given, Valuation):
        return Ledger(given)
    if given is True or isinstance(given, str | Mapping):
        return make_ledger(resolve_ledger(given))
    raise FedalignError(f"ledger must be a fedalign.Ledger, a method or a table, not {given!r:.60}")


def _own() -> dict[str, Any]:
    """List the options that a ledger has whatever its method is."""
    return {name: option for name, option in options_of(Ledger).items() if name != "method"}
