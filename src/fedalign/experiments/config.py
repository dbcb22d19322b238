"""An experiment's settings: a TOML file of the package or the user's own, checked key by key before any work."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import attrs

from fedalign.attacks.settings import resolve_adversary
from fedalign.errors import FedalignError, nearest
from fedalign.experiments.arms import ARMS, NAME, NAME_PARTS, resolve_arm
from fedalign.experiments.experiment import Experiment
from fedalign.experiments.sizes import with_sizes
from fedalign.metrics.metric import resolve_metrics
from fedalign.registry import (
    AGGREGATORS,
    CALLBACKS,
    CLIENT_STEPS,
    DATA,
    LOCAL_OPTIMIZERS,
    LOSSES,
    MODELS,
    PARTICIPATION,
    SERVER_OPTIMIZERS,
    SERVER_STEPS,
    TRACKERS,
)
from fedalign.settings.toml_file import read_toml
from fedalign.settings.typed_values import check_type
from fedalign.settings.validation import options_of
from fedalign.training.schedules import Schedule

__all__ = ["ARMS", "Experiment", "load", "load_settings", "resolve", "shipped"]

_SECTIONS = ("data", "model", "local", "participation", "server", "adversary", "arm")
_LISTS = {"client_steps": CLIENT_STEPS, "server_steps": SERVER_STEPS, "callbacks": CALLBACKS}
_NAMED = (
    "loss",
    "aggregator",
    "metrics",
    "track",
    "trackers",
    *_LISTS,
)  # texts, tables or lists of them, which the registry reads


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
    trust: Literal["report", "verify"] = "report"
    free_cap: int | float = attrs.field(default=math.inf, validator=_positive)
    free_total: int | float = attrs.field(default=math.inf, validator=_positive)
    device: str = "auto"
    tf32: bool = False
    theory: bool = False
    engine: Literal["batched", "reference"] = "batched"
    start: str = ""  # a model.safetensors file whose weights all runs start from
    chunk: int = attrs.field(default=0, validator=_not_negative)  # 0: chosen by the engine


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
    settings = _top_level(table)
    for section in ("data", "model", "local"):
        if section not in table:
            raise FedalignError(f"section [{section}] is missing")
    if "match_on" not in table and DATA.split("data", table["data"])[2].get("heldout_fraction") == 0:
        settings["match_on"] = "train"  # there is nothing else to match on
    loss = LOSSES.resolve("loss", table.get("loss", "cross-entropy"), folder)
    settings["loss"] = loss["kind"] if loss.keys() == {"kind"} else loss
    settings["data"] = DATA.resolve("data", table["data"], folder)
    settings["model"] = MODELS.resolve("model", with_sizes(table["model"], settings, folder), folder)
    local = table["local"]
    local = {"kind": "sgd", **local} if isinstance(local, dict) else local  # runs of version 0.1 have no kind
    settings["local"] = LOCAL_OPTIMIZERS.resolve("local", local, folder)
    settings["participation"] = PARTICIPATION.resolve("participation", table.get("participation", "full"), folder)
    settings["server"] = SERVER_OPTIMIZERS.resolve("server", table.get("server", "fedavg"), folder)
    settings["aggregator"] = AGGREGATORS.resolve("aggregator", table.get("aggregator", "mean"), folder)
    for key, registry in _LISTS.items():
        settings[key] = registry.resolve_all(key, table.get(key, []), folder)
    settings["trackers"] = [  # two names of one setting
        tracker for key in ("trackers", "track") for tracker in TRACKERS.resolve_all(key, table.get(key, []), folder)
    ]
    settings["metrics"] = resolve_metrics(table.get("metrics", {}), folder)
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


def _top_level(table: Mapping[str, Any]) -> dict[str, Any]:
    known = options_of(TopLevel)
    given = {}
    for key, value in table.items():
        if key in known:
            given[key] = check_type(key, value, known[key].annotation)
        elif key not in _SECTIONS and key not in _NAMED:
            raise FedalignError(f"unknown key {key}; {nearest(key, [*known, *_NAMED, *_SECTIONS])}")
    return attrs.asdict(TopLevel(**given), recurse=False)


def _arms(table: Mapping[str, Any]) -> Mapping[str, Any]:
    arms = table.get("arm", {})
    if not isinstance(arms, dict):
        raise FedalignError(f"arm must hold sections [arm.NAME], not {arms!r}")
    return arms
