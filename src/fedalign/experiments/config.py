"""An experiment's settings: a TOML file of the package or the user's own, checked key by key before any work."""

from __future__ import annotations

import dataclasses
import re
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from fedalign.data.convex import Multinomial, Quadratic
from fedalign.data.federation import Federation
from fedalign.data.images import Cifar10, Emnist, FashionMnist, Idx, ImageData
from fedalign.data.synth import Synth
from fedalign.errors import FedalignError, nearest
from fedalign.experiments.build import check, check_type, construct, resolve
from fedalign.rules.align import Align
from fedalign.rules.auto import AutoAlign
from fedalign.rules.baselines import Alone, Everyone, PriorityOnly
from fedalign.rules.literature import GradientAlign, LossWeighted, PowerOfChoice, TrustWeighted
from fedalign.rules.rule import Rule
from fedalign.simulation.spec import RunSpec
from fedalign.training import models
from fedalign.training.local import LocalSGD
from fedalign.training.losses import PerSampleLoss, cross_entropy, squared_error
from fedalign.training.participation import Bernoulli, Full, Participation, Replacement, Trace, Uniform
from fedalign.training.schedules import Schedule, Theory
from fedalign.training.server import FedAdam, FedAvgM, FedYogi, ServerOptimizer

if TYPE_CHECKING:
    from fedalign.theory.callback import TheoryCallback


@dataclass(frozen=True)
class Folder:
    """Data from the user's own folder of ``.npz`` files, one a client."""

    folder: str
    priority: list[str] | None = None
    heldout_fraction: float = 0.2

    def federation(self, seed: int) -> Federation:
        """Read the folder; the seed chooses what is held out."""
        return Federation.from_folder(
            self.folder, priority=self.priority, heldout_fraction=self.heldout_fraction, seed=seed
        )


DATA: dict[str, Callable[..., Synth | Folder | ImageData | Quadratic | Multinomial]] = {
    "synth": Synth,
    "quadratic": Quadratic,
    "multinomial": Multinomial,
    "fmnist": FashionMnist,
    "emnist": Emnist,
    "cifar10": Cifar10,
    "idx": Idx,
    "folder": Folder,
}
PARTICIPATION: dict[str, Callable[..., Participation]] = {
    "full": Full,
    "uniform": Uniform,
    "replacement": Replacement,
    "bernoulli": Bernoulli,
    "trace": Trace,
}
#: The built-in arms: what each compares.
ARMS: dict[str, str] = {
    "priority": "FedAvg on the priority clients alone",
    "all": "FedAvg on everybody, weights in proportion to sample counts",
    "local": "every client alone, with no server",
    "fedalign": "FedALIGN: free clients with |F_k − F| ≤ ε",
    "auto": "AutoALIGN: FedALIGN, with ε chosen by the priority clients every round",
    "gradient": "free clients whose update has a cosine of at least `threshold` with the priority mean",
    "trust": "FLTrust: free clients' updates weighted by that cosine, scaled to the priority mean's length",
    "choice": "power-of-choice: the `clients` free clients with the highest loss",
    "weighted": "FedAvg on everybody, weights times (F_k/F)^`power`",
}
_TOP: dict[str, Any] = {
    "name": str,
    "description": str,
    "rounds": int,
    "seeds": int,
    "warmup": int | float,
    "arms": list,
    "epsilon": int | float | Schedule,
    "match": Literal["loss", "accuracy"],
    "match_on": Literal["heldout", "train"],
    "loss": Literal["cross-entropy", "squared-error"],
    "device": str,
    "tf32": bool,
    "theory": bool,
}
_DEFAULTS: dict[str, Any] = {
    "description": "",
    "rounds": 200,
    "seeds": 5,
    "warmup": 0.1,
    "arms": ["priority", "all", "local", "fedalign"],
    "epsilon": 0.2,
    "match": "loss",
    "match_on": "heldout",
    "loss": "cross-entropy",
    "device": "auto",
    "tf32": False,
    "theory": False,
}
#: Arms from the literature: the rule, and the setting of its own.
_OTHERS: dict[str, tuple[Callable[..., Rule], str]] = {
    "gradient": (GradientAlign, "threshold"),
    "trust": (TrustWeighted, ""),
    "choice": (PowerOfChoice, "clients"),
    "weighted": (LossWeighted, "power"),
}
SERVERS: dict[str, Callable[..., ServerOptimizer | None]] = {
    "fedavg": lambda: None,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
}
LOSSES: dict[str, PerSampleLoss] = {"cross-entropy": cross_entropy, "squared-error": squared_error}
#: Settings of an arm that only some rules have.
_ONLY: dict[str, tuple[str, ...]] = {
    "epsilon": ("fedalign",),
    "match": ("fedalign", "auto"),
    "ladder": ("auto",),
    "fallback": ("auto",),
    "cosine": ("auto",),
    **{key: (rule,) for rule, (_, key) in _OTHERS.items() if key},
}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SECTIONS = ("data", "model", "local", "participation", "server", "arm")


@dataclass(frozen=True)
class ArmSettings:
    """A user's own arm ``[arm.NAME]``: a built-in rule with settings of its own."""

    rule: str
    epsilon: int | float | Schedule | None = None
    ladder: list[float] | None = None
    fallback: bool | None = None
    cosine: int | float | bool | None = None  #: false: no base
    match: str | None = None
    match_on: str | None = None
    warmup: int | float | None = None
    lr: int | float | Schedule | None = None
    mu: float | None = None
    threshold: float | None = None
    clients: int | None = None
    power: float | None = None


def shipped() -> dict[str, str]:
    """List the package's experiments with their descriptions."""
    found = {}
    for entry in sorted((resources.files("fedalign.experiments") / "toml").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".toml"):
            table = tomllib.loads(entry.read_text(encoding="utf-8"))
            found[table["name"]] = table["description"]
    return found


def load(name: str, overrides: Mapping[str, Any] | None = None) -> Experiment:
    """Read an experiment by name, or from a ``.toml`` file, with overrides such as ``{"local.lr": 0.05}``.

    >>> load("synth-medium", {"rounds": 20}).settings["rounds"]
    20
    """
    table = _read(name)
    for key, value in (overrides or {}).items():
        _override(table, key, value)
    return Experiment(_resolve(table))


class Experiment:
    """Checked settings, and the runs they describe."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.name: str = settings["name"]
        self.rounds: int = settings["rounds"]
        self.arms: list[str] = settings["arms"]
        self.seeds = list(range(settings["seeds"]))
        self._data = construct(settings["data"], DATA)
        self.participation = construct(settings["participation"], PARTICIPATION)
        self._server = construct(settings["server"], SERVERS)
        self.loss = LOSSES[settings["loss"]]
        self.device: str = settings["device"]
        self.tf32: bool = settings["tf32"]
        self._theory: dict[tuple[int, float], tuple[TheoryCallback | None, Federation]] = {}
        for arm in {*self.arms, *settings.get("arm", {})}:
            self._rule(arm)
            if not isinstance(self.local(arm).schedule, Theory):
                self.local(arm).check(self.rounds)

    def model(self) -> nn.Module:
        """Make the experiment's model."""
        return construct(self.settings["model"], models.BY_NAME)

    def federation(self, seed: int) -> Federation:
        """Make a seed's federation."""
        return self._data.federation(seed)

    def specs(self) -> list[tuple[str, int, RunSpec]]:
        """Describe every run: arm, seed and specification. All arms of a seed share its federation."""
        federations = {seed: self.federation(seed) for seed in self.seeds}
        return [(arm, seed, self._spec(arm, seed, federations[seed])) for arm in self.arms for seed in self.seeds]

    def _spec(self, arm: str, seed: int, federation: Federation) -> RunSpec:
        warmup = self._arm(arm).get("warmup", self.settings["warmup"])
        local, theory = self.local(arm), None
        if self.settings["theory"] or isinstance(local.schedule, Theory):
            local, theory = self._in_theory(federation, local)
        rule = self._rule(arm)
        return RunSpec(
            federation, rule, self.rounds, warmup, local, self.participation, seed,
            server=self._server, name=arm,
            callbacks=[] if theory is None or isinstance(rule, Alone) else [theory.for_run()],
        )  # fmt: skip

    def _in_theory(self, federation: Federation, local: LocalSGD) -> tuple[LocalSGD, TheoryCallback | None]:
        """Bind the theorems' learning rate to the federation; no callback where an assumption fails."""
        from fedalign.theory.callback import TheoryCallback
        from fedalign.theory.setting import setting_of

        key = (id(federation), local.mu)  # what arms may change, the rate aside
        if key not in self._theory:
            try:
                self._theory[key] = TheoryCallback(setting_of(self.settings, federation, local)), federation
            except FedalignError:
                if isinstance(local.schedule, Theory):
                    raise
                self._theory[key] = None, federation  # summarising the run says which assumption fails
        theory, _ = self._theory[key]
        if isinstance(local.schedule, Theory) and theory is not None:
            local = dataclasses.replace(local, lr=theory.rate)
        return local, theory

    def _arm(self, arm: str) -> dict[str, Any]:
        return dict(self.settings.get("arm", {}).get(arm, {}))

    def local(self, arm: str) -> LocalSGD:
        """Describe an arm's local work."""
        own = {key: value for key, value in self._arm(arm).items() if key in ("lr", "mu")}
        return LocalSGD(**{**self.settings["local"], **own})

    def _rule(self, arm: str) -> Rule | Alone:
        own = self._arm(arm)
        rule = own.get("rule", arm)
        if rule == "local":
            return Alone()
        match_on = own.get("match_on", self.settings["match_on"])
        chosen: Rule
        if rule == "priority":
            chosen = PriorityOnly()
        elif rule == "all":
            chosen = Everyone()
        elif rule == "auto":
            ladder = tuple(own["ladder"]) if "ladder" in own else None
            match = own.get("match", self.settings["match"])
            more = {key: own[key] for key in ("fallback", "cosine") if key in own}
            if more.get("cosine") is False:
                more["cosine"] = None
            chosen = AutoAlign(ladder, match, match_on, **more)
        elif rule in _OTHERS:
            make, key = _OTHERS[rule]
            chosen = make(match_on=match_on, **({key: own[key]} if key in own else {}))
        else:
            epsilon = own.get("epsilon", self.settings["epsilon"])
            chosen = Align(epsilon, own.get("match", self.settings["match"]), match_on)
        chosen.check(self.rounds)
        if isinstance(chosen, PriorityOnly | Everyone):
            chosen.match_on = match_on
        return chosen


def _read(name: str) -> dict[str, Any]:
    path = Path(name)
    if name.endswith(".toml") or path.is_file():
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise FedalignError(f"cannot read {name}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FedalignError(f"{name} is not valid TOML: {error}") from error
        table.setdefault("name", path.stem)
        return table
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


def _resolve(table: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if key in _SECTIONS:
            if not isinstance(value, dict):
                raise FedalignError(f"{key} must be a section [{key}], not {value!r}")
        elif key not in _TOP:
            raise FedalignError(f"unknown key {key}; {nearest(key, [*_TOP, *_SECTIONS])}")
        else:
            settings[key] = check_type(key, value, _TOP[key])
    data = table.get("data", {})
    if "match_on" not in settings and data.get("heldout_fraction") == 0:
        settings["match_on"] = "train"  # there is nothing else to match on
    settings = {key: settings.get(key, _DEFAULTS.get(key)) for key in _TOP}
    _check_options("", settings)
    if not _NAME.fullmatch(settings["name"]):
        raise FedalignError(
            f"name {settings['name']!r} may hold letters, digits, '.', '-' and '_' alone: it names a folder"
        )
    for key in ("rounds", "seeds"):
        if settings[key] < 1:
            raise FedalignError(f"{key} must be at least 1, not {settings[key]}")
    for section in ("data", "model", "local"):
        if section not in table:
            raise FedalignError(f"section [{section}] is missing")
    settings["data"] = resolve("data", table["data"], DATA)
    settings["model"] = resolve("model", table["model"], models.BY_NAME)
    settings["local"] = check("local", table["local"], LocalSGD)
    settings["participation"] = resolve("participation", table.get("participation", {"kind": "full"}), PARTICIPATION)
    settings["server"] = resolve("server", table.get("server", {"kind": "fedavg"}), SERVERS)
    own_arms = {name: _own_arm(name, own, ARMS) for name, own in table.get("arm", {}).items()}
    if own_arms:
        settings["arm"] = own_arms
    known = [*ARMS, *own_arms]
    for arm in settings["arms"]:
        if arm not in known:
            raise FedalignError(f"unknown arm {arm!r}; {nearest(str(arm), known)}")
    if not settings["arms"] or len(set(settings["arms"])) < len(settings["arms"]):
        raise FedalignError(f"arms must name at least one arm, each once, not {settings['arms']}")
    return settings


def _check_options(prefix: str, settings: Mapping[str, Any]) -> None:
    """Refuse a text that isn't one of the few that a setting may be."""
    for key in ("match", "match_on", "loss"):
        options = typing.get_args(_TOP[key])
        if key in settings and settings[key] not in options:
            raise FedalignError(f"{prefix}{key} must be {options[0]!r} or {options[1]!r}, not {settings[key]!r}")


def _own_arm(name: str, table: Any, rules: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise FedalignError(f"arm.{name} must be a section [arm.{name}], not {table!r}")
    if not _NAME.fullmatch(name):
        raise FedalignError(f"arm name {name!r} may hold letters, digits, '.', '-' and '_' alone: it names a folder")
    checked = check(f"arm.{name}", {"rule": name, **table} if name in rules else table, ArmSettings)
    _check_options(f"arm.{name}.", checked)
    if checked["rule"] not in rules:
        raise FedalignError(f"arm.{name}.rule is {checked['rule']!r}; {nearest(checked['rule'], rules)}")
    for key, having in _ONLY.items():
        if key in checked and checked["rule"] not in having:
            raise FedalignError(f"arm.{name}.{key} is of the rule {' or '.join(having)}; {checked['rule']} has none")
    return checked
