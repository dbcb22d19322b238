"""The attacks that a red team tries by default, each a table as in ``[adversary]``, and how to name others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedalign.attacks.settings import resolve_adversary
from fedalign.errors import FedalignError, nearest
from fedalign.registry import ATTACKS
from fedalign.settings.toml_file import read_toml

NO_ATTACK = "none"  #: what a red team calls the runs without an attack
_LONG = 9.9  # just under the length at which a deployment refuses an update: 10 times the longest priority client's

#: Unless ``report`` says otherwise, hostile clients claim a loss equal to F. A name without further words is the
#: attack of that name with its default options.
CATALOGUE: dict[str, dict[str, Any]] = {
    "label-flip-truthful": {"kind": "label-flip", "report": "truthful"},
    "label-flip": {"kind": "label-flip"},
    "label-flip-samples": {"kind": "label-flip", "samples": 10.0},
    "irrelevant": {"kind": "irrelevant"},
    "sign-flip": {"kind": "sign-flip"},
    "sign-flip-long": {"kind": "sign-flip", "scale": _LONG},
    "scaling": {"kind": "scaling", "factor": _LONG},
    "gaussian-3": {"kind": "gaussian", "scale": 3.0},
    "zero": {"kind": "zero"},
    "copied": {"kind": "copied"},
    "mimic": {"kind": "mimic"},
    "alie": {"kind": "alie"},
    "ipm": {"kind": "ipm"},
    "min-max": {"kind": "min-max"},
    "min-sum": {"kind": "min-sum"},
    "harmful": {"kind": "harmful-direction", "cosine": 0.01},
    "harmful-long": {"kind": "harmful-direction", "cosine": 0.01, "length": _LONG},
    "harmful-cosine-0.3": {"kind": "harmful-direction", "cosine": 0.3},
    "label-flip-blend": {"kind": ["label-flip", "blend"]},
    "sleeper": {"kind": "harmful-direction", "cosine": 0.01, "length": _LONG, "start": 0.5},
    "strike-sign-flip": {"kind": "sign-flip", "scale": _LONG, "last": 3},
    "strike-label-flip": {"kind": "label-flip", "samples": 10.0, "last": 3},
    "on-off": {"kind": "harmful-direction", "cosine": 0.01, "length": _LONG, "period": 3},
    "not-finite": {"kind": "not-finite"},
    "buffers": {"kind": "buffers"},
    "backdoor": {"kind": "backdoor"},
    "backdoor-cosine-0.3": {"kind": ["backdoor", "at-cosine(cosine=0.3)"]},
    "backdoor-disguised": {"kind": ["backdoor", "disguise"]},
    "backdoor-decoys": {"kind": ["backdoor", "decoys"]},
    "blended-backdoor": {"kind": "blended-backdoor"},
    "backdoor-long": {"kind": ["backdoor", f"scaling(factor={_LONG})"]},
}


def named_attacks(names: Iterable[str], folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return the checked tables of attacks by name, without the keys that a red team chooses.

    A name is one of the catalogue, a text as in ``adversary.kind``, or a TOML file with a section ``[adversary]``.
    Raises :class:`FedalignError` for an unknown name or a bad option.

    >>> named_attacks(["zero", "sign-flip(scale=2.0)"])["sign-flip(scale=2.0)"]["kind"]
    [{'kind': 'sign-flip', 'scale': 2.0}]
    """
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        label, table = (name, CATALOGUE[name]) if name in CATALOGUE else _own(name)
        if label == NO_ATTACK:
            raise FedalignError(f"an attack cannot be named {NO_ATTACK!r}, which stands for no attack; rename {name}")
        if label in found:
            raise FedalignError(f"the attack {label!r} is named twice")
        for key in ("fraction", "clients"):
            if key in table:
                raise FedalignError(f"the attack {label!r} sets {key}, which a red team chooses; leave it out")
        checked = resolve_adversary(table, folder)
        del checked["fraction"]
        found[label] = checked
    return found


def _own(name: str) -> tuple[str, dict[str, Any]]:
    if name.endswith(".toml"):
        return Path(name).stem, _from_file(Path(name))
    if "(" not in name and ":" not in name and ";" not in name and name not in ATTACKS.entries:
        raise FedalignError(f"unknown attack {name!r}; {nearest(name, list({**CATALOGUE, **ATTACKS.entries}))}")
    return name, {"kind": name}


def _from_file(path: Path) -> dict[str, Any]:
    section = read_toml(path).get("adversary")
    if not isinstance(section, dict):
        raise FedalignError(f"{path} has no section [adversary]")
    return section
