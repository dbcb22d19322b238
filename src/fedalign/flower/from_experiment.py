"""The settings of an experiment's arm as those of a run over Flower. They differ in data and roster alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.experiments.additions import seed_list
from fedalign.experiments.arms import arm_table
from fedalign.personal.method import PersonalMethod

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


def check_personal_methods(methods: Mapping[str, PersonalMethod]) -> None:
    """Raise :class:`FedalignError` for a personal method that only a simulation can run."""
    for name, method in methods.items():
        if method.exchanges:
            raise FedalignError(
                f"the personal method {name} sends clients' models to other clients, which no federation over "
                "Flower does; use refine, ditto or local-head"
            )


def run_settings(settings: Mapping[str, Any], arm: str, home: Path | None = None) -> dict[str, Any]:
    """Return the settings of a run over Flower, given the checked settings of an experiment and the name of an arm.

    ``home`` is the folder of the experiment's file, where its ledger's key is looked for. ``data`` and the roster are
    missing. The seed is the experiment's first. Raises :class:`FedalignError` for what only a simulation can do.

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
    if table.get("ledger", "ledger" in settings):
        found["ledger"] = settings.get("ledger") or True
        if isinstance(found["ledger"], Mapping) and found["ledger"].get("key"):
            key = Path(found["ledger"]["key"]).expanduser()
            found["ledger"] = {**found["ledger"], "key": _absolute((home or Path()) / key)}
    found["metrics"] = dict(settings["metrics"]) or ""
    if "personal" in settings:
        found["personal"] = list(settings["personal"]["methods"])
    found["seed"] = seed_list(settings["seeds"])[0]
    found["longest"] = 0.0  # a simulation has the server steps of its settings alone
    found |= {key: settings[key] for key in _COMPUTING}
    # Flower runs the server in a folder of its own.
    if settings["start"]:
        found["start"] = _absolute(settings["start"])
    if settings["participation"]["kind"] == "trace":
        found["participation"] = {**settings["participation"], "path": _absolute(settings["participation"]["path"])}
    return found


def trust_notice(settings: Mapping[str, Any], arm: str) -> str | None:
    """Return what to consider about an arm whose rule believes what free clients report; None for other arms.

    The app has the experiment's server steps alone. So without a bound on the length there, no bound is in force.

    >>> from fedalign.experiments.config import load
    >>> "consider longest = 10.0" in trust_notice(load("synth-low").settings, "fedalign")
    True
    """
    if arm_table(settings, arm).get("trust", settings["trust"]) != "report":
        return None
    said = 'The rule believes what free clients report, as in the experiment; consider trust = "verify".'
    steps = [step.get("kind") for step in settings["server_steps"] if isinstance(step, Mapping)]
    if "length-bound" not in steps:
        said += (
            " The experiment has no bound on the length of their updates, so none is in force; consider longest = 10.0."
        )
    return said


def _absolute(path: str | Path) -> str:
    return str(Path(path).absolute())


def _short(table: Any) -> Any:
    """Write a table that holds nothing but its kind as a text."""
    return table["kind"] if isinstance(table, Mapping) and table.keys() == {"kind"} else table
