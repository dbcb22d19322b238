"""The settings of a run, which Flower's run configuration gives to the server and to every client."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

from torch import nn

from fedalign.callbacks import Callback
from fedalign.errors import FedalignError, nearest
from fedalign.experiments.arms import ArmSettings, resolve_rule
from fedalign.experiments.recipe import Recipe, resolve_recipe
from fedalign.experiments.start import read_weights, with_weights
from fedalign.experiments.top_level import TopLevel, resolve_top_level
from fedalign.flower.flat_local import LOCAL_KEYS, local_table
from fedalign.flower.from_experiment import check_personal_methods
from fedalign.flower.patience import Patience
from fedalign.flower.run_config import nested
from fedalign.ledger.ledger import Ledger
from fedalign.metrics.metric import Metric
from fedalign.personal.method import PersonalMethod
from fedalign.registry import MODELS
from fedalign.rules.rule import Rule
from fedalign.settings.typed_values import check_type
from fedalign.settings.user_modules import find
from fedalign.settings.validation import options_of
from fedalign.simulation.spec import check_scaffold, initial_module
from fedalign.tracking.guard import Report, warn
from fedalign.training.optimizer import LocalOptimizer
from fedalign.training.schedules import Theory

Table = dict[str, Any]
_ARM = "flower"  # the name of the one arm in its recipe

Deliver = Literal["none", "priority", "admitted", "all"]


@dataclass(frozen=True)
class Settings:
    """What ``[tool.flwr.app.config]`` may hold, with ``-`` for ``_`` in names.

    The settings are those of an experiment's TOML file, sections included: ``local.lr`` is ``lr`` of ``[local]``, and
    ``arm`` is a table ``[arm.NAME]``, for which ``rule`` is short. Only ``data`` differs: it names a function of the
    node's configuration, as ``package.module:function``. Paths are on the server's machine.
    """

    model: str | Table
    data: str
    name: str = ""  #: what trackers and the report call the federation
    rounds: int = 50
    warmup: int | float = 0.1
    rule: str = "fedalign"
    arm: str | Table = ""  #: in place of `rule`: a table with `rule`, its options and the settings of an arm
    epsilon: float | Table = 0.2
    match: Literal["loss", "accuracy"] = "loss"
    match_on: Literal["heldout", "train"] = "heldout"
    trust: str = "verify"  #: may have options, as in `verify(within=4.0)`; `report`: believe what free clients report
    fallback: bool = True  #: for the rule `auto` with the trust `report`; verified rules always have one
    cosine: float | Literal[""] = ""  #: for the rule `auto` and for verified rules; empty: that of the rule
    loss: str | Table = "cross-entropy"
    local: str | Table = ""  #: the clients' local work, as the section [local] of experiments
    optimizer: str = "sgd"  #: the kind of `local`, for which it and the settings below from `lr` to `mu` are short
    participation: str | Table = "full"  #: whom the server asks in a round, of those that are connected
    server: str | Table = "fedavg"  #: the server's optimiser
    aggregator: str | Table = "mean"  #: how the server combines updates
    client_steps: str | list[Any] = ""  #: what clients do with updates before they send them; several with `;` between
    server_steps: str | list[Any] = ""  #: which free clients' updates the server refuses, besides `longest`
    trackers: str | list[Any] = ""  #: where the server writes curves, such as `tensorboard; mlflow`
    track: str | list[Any] = ""  #: another name of `trackers`
    callbacks: str | list[Any] = ""  #: other callbacks on the server, such as `early-stopping(patience=5)`
    metrics: str | list[Any] | Table = ""  #: what clients compute on their data, such as `f1; recall(on='heldout')`
    personal: str | list[Any] | Table = ""  #: what nodes make of the final model for their owners, such as `refine`
    ledger: bool | str | Table = False  #: true, a method or a table: value every client in every round
    lr: float | Table = 0.1
    epochs: int = 1
    batch_size: int | Literal["full"] = 50
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  #: 0: none
    mu: float = 0.0
    seed: int = 0
    roster: str = "roster.toml"
    out: str = ""  #: the output folder; empty: ~/fedalign-runs/RUN
    resume: str = ""  #: the output folder of a run to continue
    continue_stopped: bool = False  #: continue it also if it had stopped early
    timeout: float = 600.0  #: seconds that clients have to answer a request
    free_timeout: float = 0.0  #: seconds that free clients have; 0: as long as priority clients
    free_part: float = 0.5  #: of the free clients; when they and the quorum have answered, the grace time begins
    grace: float = 5.0  #: seconds that a round then waits for the others; for free clients no longer than so far
    refresh: int = 10  #: after so many rounds clients are asked again how many samples they have; 0: never
    wait: float = 120.0  #: seconds to wait at the start, and before a repeated round, for the quorum
    quorum: float = 1.0  #: the fraction of the priority clients' weight that must answer
    repeats: int = 3  #: how often a round without a quorum is repeated before the run pauses
    longest: float = 10.0  #: refuse a free update more than this many times the longest priority update; 0: never
    free_cap: float = 1.0  #: the largest weight of one free client; all priority clients together have weight 1
    free_total: float = 0.0  #: the largest weight of all admitted free clients together; 0: no cap
    transport: Literal["exact", "bfloat16", "float16"] = "exact"  #: 16 bits a number on the wire are lossy
    compress: bool = True  #: send models as differences to known ones, compressed without loss
    cache: bool = True  #: nodes keep models, and those that they have are not sent again
    deliver: Deliver = "admitted"  #: who may have the final model, if its owner keeps it; the roster may say otherwise
    start: str = ""  #: a safetensors file with the weights that the run starts from
    device: str = "cpu"
    engine: Literal["batched", "reference"] = "batched"
    chunk: int = 0  #: how many samples are measured at a time; 0: chosen by the engine
    tf32: bool = False
    recipe: Recipe = field(init=False, repr=False, compare=False)  #: these settings as those of an experiment

    def __post_init__(self) -> None:
        if self.data.count(":") != 1:
            raise FedalignError(f"data must be package.module:function, not {self.data!r}")
        if not 0 < self.quorum <= 1:
            raise FedalignError(f"quorum must be above 0 and at most 1, not {self.quorum}")
        if not 0 <= self.free_part <= 1:
            raise FedalignError(f"free-part must be from 0 to 1, not {self.free_part}")
        lowest = {
            "rounds": 1, "timeout": 0.1, "free_timeout": 0, "grace": 0, "refresh": 0, "wait": 0,
            "repeats": 0, "longest": 0, "seed": 0, "free_total": 0,
        }  # fmt: skip
        for name, least in lowest.items():
            if not getattr(self, name) >= least:
                raise FedalignError(f"{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}")
        if not self.free_cap > 0:
            raise FedalignError(f"free-cap must be positive, not {self.free_cap}")
        object.__setattr__(self, "recipe", self._made_recipe())
        recipe = self.recipe
        local, rule = recipe.local(_ARM), self.make_rule()
        if isinstance(local.schedule, Theory):
            raise FedalignError(
                "the schedule 'theory' needs the data of all clients, which stay on the nodes; "
                "write an inverse-time schedule with the mu and gamma that fedalign theory advise gives"
            )
        local.check(self.rounds)
        check_scaffold(rule, local, self.make_ledger())
        if ":" not in MODELS.split("model", self.model)[1]:  # users' own code is looked for when it is needed
            MODELS.resolve("model", self.model)
        check_personal_methods(self.make_personal())
        for made in ("aggregator", "client_steps", "server_steps", "metrics"):
            getattr(recipe, made)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Settings:
        """Read Flower's run configuration.

        >>> Settings.read({"model": "app.task:model", "data": "app.task:data", "batch-size": 20}).batch_size
        20
        """
        known = options_of(cls)
        given: dict[str, Any] = {}
        for key, value in nested(config).items():
            if key not in known:
                names = [k.replace("_", "-") for k in known]
                raise FedalignError(
                    f"unknown setting {key.replace('_', '-')!r}; {nearest(key.replace('_', '-'), names)}"
                )
            given[key] = check_type(key.replace("_", "-"), value, known[key].annotation)
        for name in ("model", "data"):
            if name not in given:
                raise FedalignError(f"the setting {name} is missing: it names a function, as package.module:function")
        for short in LOCAL_KEYS if "local" in given else ():
            if short in given:
                raise FedalignError(f"{short.replace('_', '-')} is set, and so is local, for which it is short")
        if "arm" in given and "rule" in given:
            raise FedalignError("rule is set, and so is arm; write arm.rule")
        return cls(**given)

    def as_table(self) -> Table:
        """Return the settings by name, as ``config.toml`` holds them."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.init}

    @property
    def patience(self) -> Patience:
        """How long the server waits for clients."""
        return Patience(self.timeout, self.free_timeout or self.timeout, self.free_part, self.grace)

    def _made_recipe(self) -> Recipe:
        """Return these settings as those of an experiment with one arm, and without data."""
        shared = {name: getattr(self, name) for name in options_of(TopLevel) if name in vars(self)}
        bound = [{"kind": "length-bound", "times": self.longest}] if self.longest else []
        steps = self.server_steps
        texts = [text for text in steps.split(";") if text.strip()] if isinstance(steps, str) else steps
        sections = {
            "loss": self.loss,
            "local": self.local or local_table(self),
            "participation": self.participation,
            "server": self.server,
            "aggregator": self.aggregator,
            "client_steps": self.client_steps,
            "server_steps": [*bound, *texts],
            "callbacks": self.callbacks,
            "trackers": self.trackers,
            "track": self.track,
            "metrics": self.metrics,
            **({"personal": self.personal} if self.personal else {}),
            "ledger": self.ledger,
        }
        settings = resolve_top_level(
            {**shared, "name": self.name or _ARM, "free_total": self.free_total or math.inf, "arms": [_ARM]}
        )
        return Recipe({**settings, **resolve_recipe(sections), "arm": {_ARM: self.arm_settings()}})

    def arm_settings(self) -> Table:
        """Return the checked table of the arm: its rule with the rule's options, and settings of its own."""
        if not self.arm:
            return resolve_rule("rule", self.rule)
        table = {"rule": self.arm} if isinstance(self.arm, str) else self.arm
        if not isinstance(table.get("rule"), str):
            raise FedalignError("arm.rule is missing: it names the rule, such as fedalign")
        return resolve_rule("arm", table, None, options_of(ArmSettings))

    @property
    def arm_name(self) -> str:
        """What trackers call the run: the rule."""
        return str(self.arm_settings()["rule"]) if self.arm else self.rule

    def make_module(self, *, start: bool = False) -> nn.Module:
        """Make the model with the weights of the seed; with ``start``, with those that the run starts from."""
        made = initial_module(partial(MODELS.make, MODELS.resolve("model", self.model)), self.seed)
        return with_weights(made, read_weights(self.start)) if start and self.start else made

    def make_local(self) -> LocalOptimizer:
        """Make the clients' local work."""
        return self.recipe.local(_ARM)

    def warmup_of_arm(self) -> float:
        """Return the arm's warm-up, or that of all: a fraction of the rounds, or a whole number of them."""
        return self.recipe.warmup(_ARM)

    def make_rule(self) -> Rule:
        """Make the rule; server and clients make the same one."""
        arm, usual = self.arm_settings(), {}
        cosine = None if self.cosine == "" else self.cosine
        if arm["rule"] in ("auto", "fedalign-verified"):
            usual = {"fallback": self.fallback} | ({} if cosine is None else {"cosine": cosine})
        rule = self.recipe.rule(_ARM, usual, cosine)
        if not isinstance(rule, Rule):
            raise FedalignError(f"rule is {self.arm_name!r}, which has no server; choose a rule that has one")
        return rule

    def make_ledger(self) -> Ledger | None:
        """Make the ledger that the server keeps; None: it keeps none."""
        return self.recipe.ledger(_ARM)

    def make_trackers(self, report: Report = warn) -> list[Callback]:
        """Make the trackers on the server; ``report`` is told if one fails."""
        return self.recipe.make_trackers(report)

    def make_callbacks(self) -> list[Callback]:
        """Make the other callbacks that the server tells of every round."""
        return self.recipe.make_callbacks()

    def make_personal(self) -> dict[str, PersonalMethod]:
        """Make the methods by which nodes make personal models of the final one."""
        return self.recipe.personal(_ARM)

    def make_metrics(self) -> dict[str, Metric]:
        """Make the metrics that every client computes on its own data."""
        return self.recipe.metrics


def function(reference: str) -> Callable[..., Any]:
    """Return the function that ``package.module:function`` names; raises :class:`FedalignError` if there is none.

    >>> function("math:sqrt")(9.0)
    3.0
    """
    found = find(reference)
    if not callable(found):
        raise FedalignError(f"{reference!r} is not a function")
    return found  # type: ignore[no-any-return]
