"""An experiment's settings: a TOML file of the package or the user's own, checked key by key before any work."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fedalign.attacks.settings import resolve_adversary
from fedalign.errors import FedalignError, nearest
from fedalign.experiments.arms import ARMS, NAME_PARTS, resolve_arm
from fedalign.experiments.experiment import Experiment
from fedalign.experiments.recipe import resolve_recipe
from fedalign.experiments.sizes import with_sizes
from fedalign.experiments.top_level import resolve_top_level
from fedalign.registry import DATA, MODELS
from fedalign.settings.toml_file import read_toml

__all__ = ["ARMS", "Experiment", "load", "load_settings", "resolve", "shipped"]


def shipped() -> dict[str, str]:
    """List the package's experiments with their descriptions."""
    found = {}
    for entry in sorted((resources.files("fedalign.experiments") / "toml").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".toml"):
            table = tomllib.loads(entry.read_text(encoding="utf-8"))
            found[table["name"]] = table["description"]
    return found


def load(name: str, overrides: Mapping[str, Any] | None = None, folder: Path | None = None) -> Experiment:
    """Read an experiment by name, or from a ``.toml`` file, with overrides such as ``{"local.lr": 0.05}``.

    Users' own modules (``"mine:Half"``) are looked for in ``folder``, then on Python's path. The folder is by default
    that of the file; for an experiment of the package, the current one. Raises :class:`FedalignError` with the
    setting that is wrong and what would be right.

    >>> load("synth-medium", {"rounds": 20}).settings["rounds"]
    20
    """
    return Experiment(*load_settings(name, overrides, folder))


def load_settings(
    name: str, overrides: Mapping[str, Any] | None = None, folder: Path | None = None
) -> tuple[dict[str, Any], Path]:
    """Read and check the settings of an experiment, and tell the folder of its users' modules; see :func:`load`.

    A folder of data in place of a name gives an experiment with a logistic regression on these data.
    """
    path = Path(name)
    if name.endswith(".toml") or path.is_file():
        table, home = _read(path), path.parent
    elif path.is_dir() and name not in shipped():  # a folder may have the name of the experiment that wrote it
        table, home = _on_folder(path), Path()
    else:
        table, home = _read_shipped(name), Path()
    for key, value in (overrides or {}).items():
        _override(table, key, value)
    folder = (home if folder is None else folder).resolve()
    return resolve(table, folder), folder


def _on_folder(path: Path) -> dict[str, Any]:
    """Return the settings of an experiment on the user's own data that says nothing else."""
    if (path / "config.toml").is_file():
        raise FedalignError(f"{path} is the output of a run; read it with fedalign report, or resume it with --out")
    return {
        "name": NAME_PARTS.sub("-", path.resolve().name).strip("-.") or "data",
        "data": {"kind": "folder", "folder": str(path)},
        "model": {"kind": "logistic"},
        "local": {"lr": 0.1, "epochs": 5},
    }


def _read(path: Path) -> dict[str, Any]:
    table = read_toml(path)
    table.setdefault("name", path.stem)
    return table


def _read_shipped(name: str) -> dict[str, Any]:
    known = shipped()
    if name not in known:
        raise FedalignError(f"unknown experiment {name!r}; {nearest(name, known)}")
    text = (resources.files("fedalign.experiments") / "toml").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _override(table: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise FedalignError(f"cannot set {key}: {parent} is not a section")
    table[last] = value


def resolve(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Check all settings, and give them with every default filled in, as ``config.toml`` holds them."""
    settings = resolve_top_level(table)
    for section in ("data", "model", "local"):
        if section not in table:
            raise FedalignError(f"section [{section}] is missing")
    if "match_on" not in table and DATA.split("data", table["data"])[2].get("heldout_fraction") == 0:
        settings["match_on"] = "train"  # there is nothing else to match on
    recipe = resolve_recipe(table, folder)
    settings["loss"] = recipe["loss"]
    settings["data"] = DATA.resolve("data", table["data"], folder)
    settings["model"] = MODELS.resolve("model", with_sizes(table["model"], settings, folder), folder)
    settings |= recipe
    if "adversary" in table:
        settings["adversary"] = resolve_adversary(table["adversary"], folder)
    own_arms = {name: resolve_arm(name, own, folder) for name, own in _arms(table).items()}
    if own_arms:
        settings["arm"] = own_arms
    known = [*ARMS, *own_arms]
    for arm in settings["arms"]:
        if arm not in known:
            raise FedalignError(f"unknown arm {arm!r}; {nearest(str(arm), known)}")
    return settings


def _arms(table: Mapping[str, Any]) -> Mapping[str, Any]:
    arms = table.get("arm", {})
    if not isinstance(arms, dict):
        raise FedalignError(f"arm must hold sections [arm.NAME], not {arms!r}")
    return arms
