"""The settings of runs as rows of a table, what differs between runs, and names that say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOT_SET = "–"  #: stands for a setting that a run does not have
_NOT_TOLD = frozenset({"name", "description", "arms", "seeds", "device"})  # seen on the page, or not what differs


def setting_rows(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return every setting as text, by its dotted key, as ``--set`` takes it.

    >>> setting_rows({"rounds": 5, "local": {"lr": 0.1, "fresh": False}})
    {'rounds': '5', 'local.lr': '0.1', 'local.fresh': 'false'}
    """
    rows: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            rows |= setting_rows(value, f"{prefix}{key}.")
        else:
            rows[prefix + key] = _text(value)
    return rows


def differing(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the settings that are not the same in all runs: a text for each run, by dotted key.

    >>> differing([{"rounds": 5, "local": {"lr": 0.1}}, {"rounds": 5, "local": {"lr": 0.2}}])
    {'local.lr': ['0.1', '0.2']}
    """
    rows = [setting_rows(settings) for settings in runs]
    keys = dict.fromkeys(key for row in rows for key in row)
    found = {key: [row.get(key, NOT_SET) for row in rows] for key in keys}
    return {key: texts for key, texts in found.items() if len(set(texts)) > 1}


def labels(runs: Sequence[Mapping[str, Any]], folders: Sequence[str]) -> list[str]:
    """Name each run by what differs: at most three settings, else its folder; numbered where names would be the same.

    >>> labels([{"name": "a", "local": {"lr": 0.1}}, {"name": "a", "local": {"lr": 0.2}}], ["runs/a", "runs/a-2"])
    ['lr=0.1', 'lr=0.2']
    """
    if len(runs) == 1:
        return [str(runs[0]["name"])]
    found = differing(runs)
    names = [str(settings["name"]) for settings in runs]
    told = {key: texts for key, texts in found.items() if key not in _NOT_TOLD}
    if len(set(names)) > 1:
        told = {"": names}
    if not told or len(told) > 3:
        made = [folder.rstrip("/").rpartition("/")[2] or folder for folder in folders]
    else:
        made = [
            ", ".join(f"{key.rpartition('.')[2]}={texts[i]}" if key else texts[i] for key, texts in told.items())
            for i in range(len(runs))
        ]
    if len(set(made)) < len(made):
        made = [f"{name} ({number})" for number, name in enumerate(made, start=1)]
    return made


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value) if value else "none"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
