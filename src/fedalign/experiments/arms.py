"""The arms of an experiment: a rule, built-in or the user's own, with the settings that every arm may have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from fedalign.errors import FedalignError, nearest
from fedalign.registry import RULES
from fedalign.settings.validation import check_given, options_of
from fedalign.training.schedules import Schedule

if TYPE_CHECKING:
    from inspect import Parameter

    from fedalign.rules.baselines import Alone
    from fedalign.rules.rule import Rule

#: The built-in arms, which have the names of their rules, and what each compares.
ARMS: dict[str, str] = RULES.descriptions()
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
NAME_PARTS = re.compile(r"[^A-Za-z0-9_.-]+")  #: what a name may not contain


@attrs.frozen
class ArmSettings:
    """What ``[arm.NAME]`` may hold besides the options of its rule; what is absent is the experiment's."""

    rule: str
    warmup: int | float | None = None
    lr: int | float | Schedule | None = None
    mu: float | None = None
    match_on: Literal["heldout", "train"] | None = None
    trust: str | None = None
    personal: str | list[Any] | None = None  #: in place of the methods of [personal]; an empty list: none
    ledger: bool | None = None


def arm_table(settings: Mapping[str, Any], arm: str) -> dict[str, Any]:
    """Return the settings of an arm: its own table, or for a built-in arm the rule of its name.

    >>> arm_table({"arm": {"wide": {"rule": "fedalign", "epsilon": 1.0}}}, "wide"), arm_table({}, "all")
    ({'rule': 'fedalign', 'epsilon': 1.0}, {'rule': 'all'})
    """
    return dict(settings.get("arm", {}).get(arm, {"rule": arm}))


def trains_alone(settings: Mapping[str, Any], arm: str) -> bool:
    """Say whether an arm trains a model for each client, so that it has no shared model to rank."""
    return bool(arm_table(settings, arm)["rule"] == "local")


def resolve_arm(name: str, table: Any, folder: Path | None = None) -> dict[str, Any]:
    """Check ``[arm.NAME]``, or the text ``arm.NAME = "rule(option=value)"``; gives the keys that are set, rule first.

    Raises :class:`FedalignError` for an unknown rule, for a key that neither arms nor the rule have, and for a value
    of the wrong type.

    >>> resolve_arm("wide", {"rule": "fedalign(epsilon=1.0)", "lr": 0.1})
    {'rule': 'fedalign', 'epsilon': 1.0, 'lr': 0.1}
    """
    section = f"arm.{name}"
    if not NAME.fullmatch(name):
        raise FedalignError(
            f"arm name {name!r} may contain only letters, digits, '.', '-' and '_', because it names a folder"
        )
    if isinstance(table, str):
        table = {"rule": table}
    if not isinstance(table, Mapping):
        raise FedalignError(f"{section} must be a section [{section}], not {table!r}")
    if "rule" not in table:
        if name not in ARMS:
            raise FedalignError(f"{section}.rule is missing")
        table = {"rule": name, **table}
    if not isinstance(table["rule"], str):
        raise FedalignError(f"{section}.rule must be a text, not {table['rule']!r}")
    return resolve_rule(section, table, folder, options_of(ArmSettings))


def resolve_rule(
    section: str, spec: Any, folder: Path | None = None, further: Mapping[str, Parameter] | None = None
) -> dict[str, Any]:
    """Check a rule and its options, given as a text or as a table with the key ``rule``; ``further`` are other keys.

    >>> resolve_rule("rule", "fedalign(epsilon=0.3)")
    {'rule': 'fedalign', 'epsilon': 0.3}
    """
    where, rule, options = RULES.split(section, spec, "rule")
    RULES.find(rule, folder, where)
    known = {**rule_options(rule, folder), **(further or {})}
    for key in options:
        if key not in known and "**" not in known:
            raise _unknown(section, key, rule, known)
    return {"rule": rule, **check_given(section, options, known)}


def _unknown(section: str, key: str, rule: str, known: Mapping[str, Any]) -> FedalignError:
    having = [name for name in RULES.entries if key in rule_options(name)]
    if having:
        names = " or ".join([", ".join(having[:-1]), having[-1]] if len(having) > 1 else having)
        return FedalignError(f"{section}.{key} is an option of the rule {names}; {rule} has no such option")
    return FedalignError(f"unknown key {section}.{key}; {nearest(key, known)}")


def rule_options(rule: str, folder: Path | None = None) -> dict[str, Parameter]:
    """List a rule's options under the names that settings have for them: what Python calls ``on`` is ``match``.

    >>> sorted(rule_options("fedalign"))
    ['epsilon', 'match', 'match_on']
    """
    return {"match" if key == "on" else key: option for key, option in options_of(RULES.find(rule, folder)).items()}


def make_rule(arm: Mapping[str, Any], usual: Mapping[str, Any], folder: Path | None = None) -> Rule | Alone:
    """Make the rule of a checked arm. ``usual`` are the experiment's settings for the options that the arm leaves open.

    An experiment's ``epsilon`` and ``match`` go to every rule that has such an option. ``match_on`` goes to all.

    >>> make_rule({"rule": "fedalign"}, {"epsilon": 0.5, "match": "loss", "match_on": "train"})
    Align(epsilon=0.5, on='loss', match_on='train')
    """
    known = rule_options(arm["rule"], folder)
    open_ended = "**" in known
    arms_own = {field.name for field in attrs.fields(ArmSettings)}
    options = {key: value for key, value in usual.items() if key in known}
    options |= {key: value for key, value in arm.items() if key in known or (open_ended and key not in arms_own)}
    options.pop("rule", None)  # `weighted` has an option of this name, but the arm's rule is meant
    if "match" in options:
        parameters = options_of(RULES.find(arm["rule"], folder))
        options["match" if "match" in parameters else "on"] = options.pop("match")
    rule: Rule | Alone = RULES.make({"kind": arm["rule"], **options}, folder)
    if "match_on" not in known and hasattr(rule, "match_on") and ("match_on" in arm or rule.match_on is None):
        # Frozen dataclasses are rules, too.
        object.__setattr__(rule, "match_on", arm.get("match_on", usual.get("match_on")))
    return rule
