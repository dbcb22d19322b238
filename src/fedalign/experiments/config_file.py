"""The ``config.toml`` of an output folder: how it is read, and compared with the settings of a run that continues."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError

_MAY_CHANGE = ("device", "trackers")  # on a resume


def read_settings(folder: Path) -> dict[str, Any]:
    """Read a folder's ``config.toml``; raises :class:`FedalignError` if it is damaged."""
    path = folder / "config.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedalignError(f"{path} is damaged: {error}") from error


def check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Compare the settings of a folder's runs with those to continue with; returns notes for the user.

    Raises :class:`FedalignError`, which names what has changed. Another device is only a note, and trackers, which do
    not change a run, may be others.

    >>> check_same(Path("out"), {"rounds": 5, "device": "cpu"}, {"rounds": 5, "device": "cuda"})
    ['the run began on cpu and continues on cuda: the last bits may differ']
    """
    old, new = _flatten(before), _flatten(now)
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key not in _MAY_CHANGE)
    for key in changed:
        if key.endswith(".fingerprint") and key in old and key in new:
            raise FedalignError(
                f"{folder} was run with another {key.removesuffix('.fingerprint')}: an object that is given in Python "
                f"must be the same to resume, but its fingerprint was {old[key]} and is {new[key]}"
            )
    if changed:
        shown = "; ".join(f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in changed)
        raise FedalignError(f"{folder} was run with other settings, so it cannot be resumed with these: {shown}")
    if old.get("device") != new.get("device"):
        return [f"the run began on {old.get('device')} and continues on {new.get('device')}: the last bits may differ"]
    return []


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
