"""Settings in Flower's run configuration: one level of keys, whose values are numbers, texts, true or false.

A table such as ``[tool.flwr.app.config.local]`` has dotted keys here, ``local.lr``, as Flower passes them.
A list is a text in TOML's notation, ``"[0.0, 0.2]"``; an inline table may be one, too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

from fedalign.errors import FedalignError

#: The settings of experiments that make no sense over Flower, and why.
_SIMULATED = {
    "seeds": "a run over Flower has one seed; write seed = 0",
    "arms": 'a run over Flower has one arm; write rule = "fedalign", or a table [arm] with its rule and settings',
    "adversary": "hostile clients are simulated, and nodes over Flower are real clients",
    "theory": "the theory's constants need the data of all clients, which stay on the nodes",
}

#: The settings that may name code which runs on the server alone; a node's gate lets them pass.
SERVER_CODE = ("callbacks", "trackers", "track")


def for_node(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run configuration without :data:`SERVER_CODE`, so that a node imports nothing which these name.

    >>> for_node({"lr": 0.1, "callbacks": "package.module:Name", "track.kind": "csv"})
    {'lr': 0.1}
    """
    return {key: value for key, value in config.items() if key.split(".")[0] not in SERVER_CODE}


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run configuration as nested tables, with lists in place of their texts.

    Settings' names may be written with ``-`` for ``_``. Raises :class:`FedalignError` for a setting that simulations
    alone have, and for a key that is both a value and a table.

    >>> nested({"local.lr": 0.1, "local.epochs": 5, "arm.ladder": "[0, 0.2]", "match-on": "train"})
    {'local': {'lr': 0.1, 'epochs': 5}, 'arm': {'ladder': [0, 0.2]}, 'match_on': 'train'}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        first, *rest = key.split(".")
        *parents, last = first.replace("-", "_"), *rest
        if first in _SIMULATED:
            if (first, value) == ("theory", False):
                continue
            raise FedalignError(f"{first} is a setting of simulations: {_SIMULATED[first]}")
        table = found
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise FedalignError(f"{key} is set, but {parent} has a value of its own")
        if isinstance(table.get(last), dict):
            raise FedalignError(f"{key} has a value, but {key}.{next(iter(table[last]))} is set, too")
        table[last] = _read(key, value)
    return found


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings as a run configuration, so that :func:`nested` gives them back.

    >>> flat({"local": {"lr": 0.1}, "arm": {"rule": "auto", "ladder": [0.0, 0.2]}})
    {'local.lr': 0.1, 'arm.rule': 'auto', 'arm.ladder': '[0.0, 0.2]'}
    """
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": one for name, one in flat(value).items()}
        else:
            found[key] = in_line(value) if isinstance(value, list | tuple) else value
    return found


def in_line(value: Any) -> str:
    """Write a value as TOML has it, in one line.

    >>> in_line([{"kind": "clip", "length": 1.0}])
    '[{ kind = "clip", length = 1.0 }]'
    """
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {in_line(one)}' for key, one in value.items())} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_line, value))}]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def key_in_line(key: str) -> str:
    """Write a dotted key as TOML has it.

    >>> key_in_line("metrics.top 5.kind")
    'metrics."top 5".kind'
    """
    return ".".join(map(_key, key.split(".")))


def _key(name: str) -> str:
    return tomli_w.dumps({name: 0}).removesuffix(" = 0\n")


def _read(key: str, value: Any) -> Any:
    """Read a text that is a list or a table."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise FedalignError(f"{key} is {value!r}, which is neither a list nor a table of TOML: {error}") from error
