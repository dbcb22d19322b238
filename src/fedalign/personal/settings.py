"""The section ``[personal]`` of settings: which personal methods the clients use, and options that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError, nearest
from fedalign.personal.method import PersonalMethod, methods_by_label
from fedalign.registry import PERSONAL
from fedalign.settings.typed_values import check_type
from fedalign.settings.validation import options_of


def resolve_personal(given: Any, folder: Path | None = None, section: str = "personal") -> dict[str, Any]:
    """Check ``[personal]``, or a text or a list of methods, and fill in every default.

    Besides ``methods`` and ``save``, the section holds options for those methods that have them. Raises
    :class:`FedalignError` for whatever is wrong.

    >>> resolve_personal({"methods": ["refine", "ditto(mu=0.5)"], "epochs": 3})["methods"][0]
    {'kind': 'refine', 'epochs': 3, 'patience': 5}
    """
    table = dict(given) if isinstance(given, Mapping) else {"methods": given}
    if "kind" in table:  # one method, as a table
        table = {"methods": [table]}
    if "methods" not in table:
        raise FedalignError(f"{section}.methods is missing: it names methods such as {', '.join(PERSONAL.entries)}")
    save = check_type(f"{section}.save", table.pop("save", False), bool)
    specs = table.pop("methods")
    if isinstance(specs, str):
        specs = [text for text in specs.split(";") if text.strip()]
    if not isinstance(specs, list | tuple):
        raise FedalignError(f"{section}.methods must be a list, not {specs!r}")
    split = [PERSONAL.split(f"{section}.methods[{place}]", spec) for place, spec in enumerate(specs)]
    known = [options_of(PERSONAL.find(name, folder, where)) for where, name, _ in split]
    for key in table:
        if not any(key in options for options in known):
            every = [*(option for options in known for option in options), "methods", "save"]
            raise FedalignError(f"unknown key {section}.{key}; {nearest(key, every)}")
    methods = [
        PERSONAL.resolve(
            f"{section}.methods[{place}]",
            {"kind": name, **{key: value for key, value in table.items() if key in options}, **own},
            folder,
        )
        for place, ((_, name, own), options) in enumerate(zip(split, known, strict=True))
    ]
    made = {"methods": methods, "save": save}
    make_methods(made, folder)
    return made


def make_methods(table: Mapping[str, Any], folder: Path | None = None) -> dict[str, PersonalMethod]:
    """Make the methods of a checked section, by the names that outputs have for them."""
    return methods_by_label([PERSONAL.make(one, folder) for one in table["methods"]])


def as_methods(given: Sequence[Any] | str | PersonalMethod) -> dict[str, PersonalMethod]:
    """Make what Python is given as methods: objects, texts and tables; one text may name several, with ``;`` between.

    >>> list(as_methods("refine; ditto(mu=1.0)"))
    ['refine', 'ditto']
    """
    if isinstance(given, str | Mapping):
        return make_methods(resolve_personal(given))
    each = [given] if isinstance(given, PersonalMethod) else given
    return methods_by_label([PERSONAL.accept("personal", one) for one in each])
