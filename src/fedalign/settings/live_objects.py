"""Objects that were given in Python and that no settings file can describe: a federation in memory, a lambda.

Settings hold a table in their place, with the kind ``python``, what the object is in words, and its fingerprint. The
table makes the object again as long as the program that gave it holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from fedalign.errors import FedalignError
from fedalign.settings.fingerprint import fingerprint

LIVE = "python"  #: the kind of such tables
_held: weakref.WeakValueDictionary[str, Held]


class Held:
    """An object that settings refer to; they can do so while this exists.

    ``make`` gives the object for use: itself, or a copy where each run needs its own.
    """

    def __init__(self, given: Any, make: Callable[[], Any]) -> None:
        self.words = _in_words(given)
        self.fingerprint = fingerprint(given)
        self.make = make
        _held[self.fingerprint] = self

    @property
    def table(self) -> dict[str, Any]:
        """The options of the table that stands for the object, besides its kind."""
        return {"object": self.words, "fingerprint": self.fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be found in the process that this was sent to."""
        vars(self).update(state)
        _held[self.fingerprint] = self


_held = weakref.WeakValueDictionary()


class Live:
    """What the kind ``python`` makes: the object with this fingerprint, which the program holds.

    >>> held = Held(print, lambda: print)
    >>> Live(**held.table) is print
    True
    >>> Live("a lambda", "0123")
    Traceback (most recent call last):
    fedalign.errors.FedalignError: a lambda was given in Python (fingerprint 0123), and this program has no such \
object: run the script that gives it, unchanged
    """

    def __new__(cls, object: str, fingerprint: str) -> Any:
        """Return the object; raises :class:`FedalignError` if the program has none with this fingerprint."""
        held = _held.get(fingerprint)
        if held is None:
            raise FedalignError(
                f"{object} was given in Python (fingerprint {fingerprint}), and this program has no such object: "
                "run the script that gives it, unchanged"
            )
        return held.make()


def live_sections(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Name the settings that stand for objects given in Python.

    >>> live_sections({"rounds": 3, "model": {"kind": "python", "object": "a lambda", "fingerprint": "0123"}})
    ['model']
    """
    found = []
    for key, value in settings.items():
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if isinstance(entry, Mapping):
                is_live = LIVE in (entry.get("kind"), entry.get("rule"))
                found += [f"{prefix}{key}"] if is_live else live_sections(entry, f"{prefix}{key}.")
    return found


def _in_words(given: Any) -> str:
    name = getattr(given, "__qualname__", None)
    if name is None:
        text = repr(given)
        return text if len(text) < 100 and " at 0x" not in text and "\n" not in text else f"a {type(given).__name__}"
    return "a lambda" if name.endswith("<lambda>") else str(name)
