"""Objects by name: found, their options checked against signatures, and made. The names are in the registry."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from fedalign.errors import FedalignError, nearest
from fedalign.settings import user_modules
from fedalign.settings.live_objects import LIVE, Live
from fedalign.settings.notation import parse
from fedalign.settings.validation import arguments, check_options, options_of


@attrs.frozen
class Registry:
    """The built-ins of one kind (rules, models, …), and how to find, check and make one.

    ``entries`` maps a built-in name to its reference and a description. ``base`` refers to the class that made objects
    belong to (none: no check). The program itself passes the first ``given`` arguments of a function when it calls
    it, as the outputs and targets of a loss; such a function is used as it is, with its options bound.

    >>> from fedalign.registry import PARTICIPATION
    >>> PARTICIPATION.resolve("participation", "bernoulli(p=0.5)")
    {'kind': 'bernoulli', 'p': 0.5}
    >>> PARTICIPATION.make({"kind": "bernoulli", "p": 0.5})
    Bernoulli(p=0.5)
    >>> PARTICIPATION.resolve("participation", {"kind": "unifrom", "fraction": 0.5})
    Traceback (most recent call last):
    fedalign.errors.FedalignError: participation.kind is 'unifrom'; did you mean 'uniform'?
    """

    noun: str
    entries: dict[str, tuple[str, str]]
    base: tuple[str, ...] = ()
    wanted: str = ""  #: what a user's own object must be, for the error message
    given: int = 0

    def descriptions(self) -> dict[str, str]:
        """List the built-in names with their descriptions."""
        return {name: text for name, (_, text) in self.entries.items()}

    def find(self, name: str, folder: Path | None = None, where: str = "") -> Callable[..., Any]:
        """Give the class or function of a name; users' own modules are looked for in ``folder`` first.

        Raises :class:`FedalignError`; ``where`` is the setting that its message names.
        """
        where = where or f"the {self.noun}"
        if name == LIVE:
            return Live
        if ":" not in name:
            if name not in self.entries:
                raise FedalignError(f"{where} is {name!r}; {nearest(name, self.entries)}")
            return user_modules.find(self.entries[name][0])  # type: ignore[no-any-return]
        try:
            found = user_modules.find(name, folder)
        except FedalignError as error:
            raise FedalignError(f"{where} is {name!r}, but {error}") from error
        wrong = not callable(found) or (
            inspect.isclass(found) and bool(self.base) and not issubclass(found, self._bases())
        )
        if wrong:
            what = f"the class {found.__name__}" if inspect.isclass(found) else f"a {type(found).__name__}"
            raise FedalignError(f"{where} is {name!r}, which is {what}, not {self.wanted or 'a class or a function'}")
        return found  # type: ignore[no-any-return]

    def split(self, section: str, spec: Any, key: str = "kind") -> tuple[str, str, dict[str, Any]]:
        """Read either notation: where the name stands in the settings, the name, and the options as they are given."""
        if isinstance(spec, str):
            return (section, *parse(spec))
        if not isinstance(spec, Mapping):
            raise FedalignError(f"{section} must be a section [{section}] or a text, not {spec!r}")
        where, text = f"{section}.{key}", spec.get(key)
        if text is None:
            raise FedalignError(f"{where} is missing; known: {', '.join(sorted(self.entries))}")
        if not isinstance(text, str):
            raise FedalignError(f"{where} is {text!r}; {nearest(str(text), self.entries)}")
        name, options = parse(text)
        for option, value in spec.items():
            if option in options:
                raise FedalignError(f"{section}.{option} is given twice: {text!r} has it, too")
            if option != key:
                options[option] = value
        return where, name, options

    def resolve(self, section: str, spec: Any, folder: Path | None = None) -> dict[str, Any]:
        """Check a text or a table, and give the table with ``kind`` first and all defaults filled in.

        Raises :class:`FedalignError` for an unknown name, an unknown or missing option, or a value of the wrong type.
        """
        where, name, options = self.split(section, spec)
        make = self.find(name, folder, where)
        return {"kind": name, **check_options(section, options, make, self._given(make))}

    def resolve_all(self, section: str, specs: Any, folder: Path | None = None) -> list[dict[str, Any]]:
        """Check a list of texts and tables; one text may name several, with ``;`` between them."""
        if isinstance(specs, str):
            specs = [text for text in specs.split(";") if text.strip()]
        if not isinstance(specs, list):
            raise FedalignError(f"{section} must be a list, not {specs!r}")
        return [self.resolve(f"{section}[{place}]", spec, folder) for place, spec in enumerate(specs)]

    def make(self, table: Mapping[str, Any], folder: Path | None = None, **more: Any) -> Any:
        """Make what a resolved table describes; ``more`` are further arguments, in Python's types.

        Raises :class:`FedalignError` if the options are refused or the object is not of the right kind.
        """
        return self.build(self.find(table["kind"], folder), table, folder, **more)

    def accept(self, section: str, given: Any) -> Any:
        """Make what a text or a table names; return anything else, such as an object of the right kind, as it is.

        >>> from fedalign.registry import PARTICIPATION
        >>> PARTICIPATION.accept("participation", "bernoulli(p=0.5)")
        Bernoulli(p=0.5)
        """
        return self.make(self.resolve(section, given)) if isinstance(given, str | Mapping) else given

    def build(self, make: Callable[..., Any], table: Mapping[str, Any], folder: Path | None = None, **more: Any) -> Any:
        """Make what a table describes with the class or function that :meth:`find` gave for it."""
        name = table["kind"]
        given = self._given(make)
        options = {key: value for key, value in table.items() if key != "kind"}
        keywords = {**arguments(options, options_of(make, given), folder), **more}
        if given:
            return functools.partial(make, **keywords) if keywords else make
        try:
            made = make(**keywords)
        except FedalignError:
            raise
        except Exception as error:
            if ":" not in name:
                raise
            raise FedalignError(f"cannot make the {self.noun} {name!r}: {user_modules.in_words(error)}") from error
        if self.base and not isinstance(made, self._bases()):
            raise FedalignError(f"{name!r} made a {type(made).__name__}, not {self.wanted}")
        return made

    def _given(self, make: Callable[..., Any]) -> int:
        return 0 if inspect.isclass(make) else self.given

    def _bases(self) -> tuple[type, ...]:
        return tuple(user_modules.find(reference) for reference in self.base)
