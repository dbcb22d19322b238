"""The section ``[adversary]`` of settings: checked key by key, made into an :class:`Adversary`, and put into words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedalign.attacks.adversary import Adversary
from fedalign.errors import FedalignError, nearest
from fedalign.registry import ATTACKS
from fedalign.settings.validation import check_given, check_options, options_of

SECTION = "adversary"
_REPORTS = {
    "aligned": "They report a loss equal to F",
    "truthful": "They report their true loss",
    "high": "They report a hundred times F",
    "low": "They report a hundredth of F",
}


def resolve_adversary(given: Any, folder: Path | None = None) -> dict[str, Any]:
    """Check a text or a table and return a table with all defaults, where ``kind`` is a list of the attacks' tables.

    The options of a single attack may stand in the table beside the adversary's own. A text may name several attacks,
    with ``;`` between them. Raises :class:`FedalignError` for an unknown name, an unknown option or a wrong value.

    >>> resolve_adversary({"kind": "sign-flip", "scale": 9.9, "fraction": 0.5})["kind"]
    [{'kind': 'sign-flip', 'scale': 9.9}]
    >>> resolve_adversary({"kind": "sign-flip", "fractoin": 0.5})
    Traceback (most recent call last):
    fedalign.errors.FedalignError: unknown key adversary.fractoin; did you mean 'fraction'?
    """
    if isinstance(given, str):
        given = {"kind": given}
    if not isinstance(given, Mapping):
        raise FedalignError(f"adversary must be a section [adversary] or a text, not {given!r}")
    if "kind" not in given:
        raise FedalignError(f"adversary.kind is missing; known: {', '.join(sorted(ATTACKS.entries))}")
    known = {key: option for key, option in options_of(Adversary).items() if key != "kind"}
    own = {key: value for key, value in given.items() if key in known}
    options = {key: value for key, value in given.items() if key not in known and key != "kind"}
    kinds = _kinds(given["kind"])
    if len(kinds) == 1:
        attacks = [_attack(kinds[0], options, known, folder)]
    elif options:
        name = next(iter(options))
        raise FedalignError(
            f"adversary.{name} belongs to one attack, but adversary.kind names several; write it as name({name}=…)"
        )
    else:
        attacks = [ATTACKS.resolve("adversary.kind", kind, folder) for kind in kinds]
    defaults = {key: option.default for key, option in known.items() if option.default is not None}
    checked = {"kind": attacks, **defaults, **check_given(SECTION, own, known)}
    make_adversary(checked, folder)  # so that bad values are refused here
    return checked


def make_adversary(table: Mapping[str, Any], folder: Path | None = None) -> Adversary:
    """Make the adversary of a table that :func:`resolve_adversary` gave."""
    own: dict[str, Any] = {key: None if value is False else value for key, value in table.items() if key != "kind"}
    return Adversary([ATTACKS.make(attack, folder) for attack in table["kind"]], **own)


def as_adversary(given: Adversary | str | Mapping[str, Any] | None) -> Adversary | None:
    """Make the adversary that a text or a table describes; an adversary, or None, is returned as it is.

    >>> as_adversary("backdoor(target=3); at-cosine").attacks[1]
    AtCosine(cosine=0.3, length=1.0)
    """
    return make_adversary(resolve_adversary(given)) if isinstance(given, str | Mapping) else given


def in_words(table: Mapping[str, Any]) -> str:
    """Describe a checked adversary in one or two sentences, for reports.

    >>> in_words(resolve_adversary("sign-flip(scale=9.9)"))
    '25 % of the free clients are hostile: sign-flip(scale=9.9). They report a loss equal to F.'
    """
    clients = table.get("clients")
    who = f"{100 * table['fraction']:g} % of the free clients are" if not clients else f"{', '.join(clients)} are"
    text = f"{who} hostile: {' + '.join(short_name(attack) for attack in table['kind'])}"
    if table["start"]:
        start = table["start"]
        text += f", from round {start:g} on" if start >= 1 else f", after {100 * start:g} % of the rounds"
    if table.get("last"):
        text += f", in the last {table['last']} rounds alone"
    if table.get("period"):
        text += f", {table['period']} rounds on and {table['period']} off"
    text += f". {_REPORTS[table['report']]}"
    if table["samples"] != 1:
        text += f" and {table['samples']:g} times their sample count"
    return text + ("." if table["knows"] == "all" else ", and know only their own updates.")


def short_name(attack: Mapping[str, Any]) -> str:
    """Write an attack's table in the text notation.

    >>> short_name({"kind": "at-cosine", "cosine": 0.3, "length": 1.0})
    'at-cosine(cosine=0.3, length=1.0)'
    """
    options = ", ".join(f"{key}={value!r}" for key, value in attack.items() if key != "kind")
    return f"{attack['kind']}({options})" if options else str(attack["kind"])


def _kinds(kind: Any) -> list[Any]:
    if isinstance(kind, str):
        kind = [text for text in kind.split(";") if text.strip()]
    if isinstance(kind, Mapping):
        kind = [kind]
    if not isinstance(kind, list | tuple) or not kind:
        raise FedalignError(f"adversary.kind must name an attack, or be a list of attacks, not {kind!r}")
    return list(kind)


def _attack(kind: Any, options: Mapping[str, Any], known: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Check the only attack of an adversary, whose options may stand in the section."""
    table = dict(kind) if isinstance(kind, Mapping) else {"kind": kind}
    for key in options:
        if key in table:
            raise FedalignError(f"adversary.{key} is given twice: adversary.kind has it, too")
    where, name, merged = ATTACKS.split(SECTION, {**table, **options})
    make = ATTACKS.find(name, folder, where)
    allowed = options_of(make)
    for key in options:
        if key not in allowed and "**" not in allowed:
            raise FedalignError(f"unknown key adversary.{key}; {nearest(key, [*allowed, *known, 'kind'])}")
    return {"kind": name, **check_options(SECTION, merged, make)}
