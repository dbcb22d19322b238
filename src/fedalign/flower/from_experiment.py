"""The settings of an experiment's arm as those of a run over Flower. They differ in data and roster alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedalign.errors import FedalignError
from fedalign.experiments.additions import seed_list
from fedalign.experiments.arms import arm_table

_TOP = ("name", "rounds", "warmup", "epsilon", "match", "match_on", "trust", "free_cap", "free_total")
_NAMED = ("model", "loss", "local", "participation", "server", "aggregator")
_LISTS = ("client_steps", "server_steps", "callbacks", "trackers")
_COMPUTING = ("start", "device", "engine", "chunk", "tf32")


def choose_arm(settings: Mapping[str, Any], arm: str | None = None) -> str:
    """Return the arm to run over Flower: the one that is named, or the only one that has a server.

    Raises :class:`FedalignError` if the experiment has several arms, or not the one that is named.

    >>> choose_arm({"name": "mine", "arms": ["fedalign", "local"]})
    'fedalign'
    """
    arms: list[str] = settings["arms"]
    known = [*arms, *(one for one in settings.get("arm", {}) if one not in arms)]
    if arm is None:
        serving = [one for one in arms if arm_table(settings, one)["rule"] != "local"]
        if len(serving) != 1:
            raise FedalignError(f"{settings['name']} has the arms {', '.join(arms)}; choose one with --arm")
        return serving[0]
    if arm not in known:
        raise FedalignError(f"{settings['name']} has no arm {arm!r}; it has {', '.join(known)}")
    return arm


def run_settings(settings: Mapping[str, Any], arm: str) -> dict[str, Any]:
    """Return the settings of a run over Flower, given the checked settings of an experiment and the name of an arm.

    ``data`` and the roster are missing. The seed is the experiment's first. Raises :class:`FedalignError` for what only
    a simulation can do.

    >>> from fedalign.experiments.config import load
    >>> run_settings(load("synth-low").settings, "fedalign")["rule"]
    'fedalign'
    """
    table = arm_table(settings, arm)
    if table["rule"] == "local":
        raise FedalignError(f"the arm {arm!r} trains every client alone, so there is nothing to run over Flower")
    if "adversary" in settings:
        raise FedalignError(
            f"{settings['name']} has an adversary, whose clients are simulated; nodes over Flower are real clients"
        )
    for rate in (settings["local"].get("lr"), table.get("lr")):
        if isinstance(rate, Mapping) and rate.get("schedule") == "theory":
            raise FedalignError(
                f"{settings['name']} has the theory's learning rate, whose constants need the data of all clients; "
                "set one with --set local.lr=0.05"
            )
    found: dict[str, Any] = {key: settings[key] for key in _TOP}
    found |= {"rule": table["rule"]} if table.keys() == {"rule"} else {"arm": table}
    found |= {key: _short(settings[key]) for key in _NAMED}
    found |= {key: list(settings[key]) or "" for key in _LISTS}
    found["metrics"] = dict(settings["metrics"]) or ""
    found["seed"] = seed_list(settings["seeds"])[0]
    found["longest"] = 0.0  # a simulation has the server steps of its settings alone
    return found | {key: settings[key] for key in _COMPUTING}


def _short(table: Any) -> Any:
    """Write a table that holds nothing but its kind as a text."""
    return table["kind"] if isinstance(table, Mapping) and table.keys() == {"kind"} else table
