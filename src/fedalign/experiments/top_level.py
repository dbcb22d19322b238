"""The settings of an experiment outside of sections: their types, their defaults and what values they may have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from fedalign.errors import FedalignError, nearest
from fedalign.experiments.arms import NAME
from fedalign.rules.trust import read_trust
from fedalign.settings.typed_values import check_type
from fedalign.settings.validation import options_of
from fedalign.training.schedules import Schedule

SECTIONS = ("data", "model", "local", "participation", "server", "adversary", "personal", "ledger", "arm")
#: Texts, tables or lists of them, which the registry reads.
NAMED = ("loss", "aggregator", "metrics", "track", "trackers", "client_steps", "server_steps", "callbacks")


def _at_least_one(instance: Any, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise FedalignError(f"{attribute.name} must be at least 1, not {value}")


def _seeds(instance: Any, attribute: attrs.Attribute[Any], value: int | list[int]) -> None:
    if isinstance(value, int):
        _at_least_one(instance, attribute, value)
    elif not value or len(set(value)) < len(value) or min(value) < 0:
        raise FedalignError(f"seeds must be a number of seeds, or a list of seeds from 0 on, each once, not {value}")


def _positive(instance: Any, attribute: attrs.Attribute[float], value: float) -> None:
    if not value > 0:
        raise FedalignError(f"{attribute.name} must be a positive number, or inf for no cap, not {value}")


def _not_negative(instance: Any, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 0:
        raise FedalignError(f"{attribute.name} must be at least 0, not {value}")


def _names_a_folder(instance: Any, attribute: attrs.Attribute[str], value: str) -> None:
    if not NAME.fullmatch(value):
        raise FedalignError(
            f"name {value!r} may contain only letters, digits, '.', '-' and '_', because it names a folder"
        )


def _each_once(instance: Any, attribute: attrs.Attribute[list[str]], value: list[str]) -> None:
    if not value or len(set(value)) < len(value):
        raise FedalignError(f"arms must name at least one arm, each once, not {value}")


def _trust(instance: Any, attribute: attrs.Attribute[str], value: str) -> None:
    read_trust(value)


def _default_arms() -> list[str]:
    return ["priority", "all", "local", "fedalign"]


@attrs.frozen
class TopLevel:
    """The settings of an experiment outside of sections, with their defaults."""

    name: str = attrs.field(validator=_names_a_folder)
    description: str = ""
    rounds: int = attrs.field(default=200, validator=_at_least_one)
    seeds: int | list[int] = attrs.field(default=5, validator=_seeds)
    warmup: int | float = 0.1
    arms: list[str] = attrs.field(factory=_default_arms, validator=_each_once)
    epsilon: int | float | Schedule = 0.2
    match: Literal["loss", "accuracy"] = "loss"
    match_on: Literal["heldout", "train"] = "heldout"
    trust: str = attrs.field(default="report", validator=_trust)
    free_cap: int | float = attrs.field(default=math.inf, validator=_positive)
    free_total: int | float = attrs.field(default=math.inf, validator=_positive)
    device: str = "auto"
    tf32: bool = False
    theory: bool = False
    engine: Literal["batched", "reference"] = "batched"
    start: str = ""  # a model.safetensors file whose weights all runs start from
    chunk: int = attrs.field(default=0, validator=_not_negative)  # 0: chosen by the engine


def resolve_top_level(table: Mapping[str, Any]) -> dict[str, Any]:
    """Check the settings outside of sections, and return them with every default filled in.

    Raises :class:`FedalignError` for a wrong value, and for a key that is neither a setting nor a section.

    >>> resolve_top_level({"name": "mine", "rounds": 20})["warmup"]
    0.1
    """
    known = options_of(TopLevel)
    given = {}
    for key, value in table.items():
        if key in known:
            given[key] = check_type(key, value, known[key].annotation)
        elif key not in SECTIONS and key not in NAMED:
            raise FedalignError(f"unknown key {key}; {nearest(key, [*known, *NAMED, *SECTIONS])}")
    return attrs.asdict(TopLevel(**given), recurse=False)
