"""A run's settings, as Flower's run configuration gives them to the server and to every client."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedalign.errors import FedalignError, nearest
from fedalign.experiments.build import check_type, settings_of
from fedalign.rules.align import Align, AutoAlign, Everyone, PriorityOnly
from fedalign.rules.rule import Rule
from fedalign.training.local import LocalSGD

RULES: dict[str, str] = {
    "priority": "FedAvg on the priority clients",
    "all": "FedAvg on everybody",
    "fedalign": "FedALIGN with `epsilon`",
    "auto": "AutoALIGN",
}


@dataclass(frozen=True)
class Settings:
    """What ``[tool.flwr.app.config]`` may hold, with ``-`` for ``_`` in names.

    ``model`` and ``data`` name functions, as ``package.module:function``. Paths are of the server's machine.
    """

    model: str
    data: str
    rounds: int = 50
    warmup: float = 0.1
    rule: str = "fedalign"
    epsilon: float = 0.2
    match: Literal["loss", "accuracy"] = "loss"
    match_on: Literal["heldout", "train"] = "heldout"
    fallback: bool = True  #: of the rule `auto`, as is `cosine`
    cosine: float = -0.1
    lr: float = 0.1
    epochs: int = 1
    batch_size: int = 50
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  #: 0: none
    mu: float = 0.0
    seed: int = 0
    roster: str = "roster.toml"
    out: str = ""  #: where output goes; empty: ~/fedalign-runs/RUN
    resume: str = ""  #: go on with the run whose output is there
    timeout: float = 600.0  #: seconds that clients have for each request
    wait: float = 120.0  #: seconds to wait at the start, and before a repeated round, for the quorum
    quorum: float = 1.0  #: the part of the priority clients' weight that must answer
    repeats: int = 3  #: how often a round without a quorum is repeated before the run pauses
    longest: float = (
        10.0  #: a free client's update is refused if it is so many times the longest priority update; 0: never
    )
    free_cap: float = 1.0  #: the most that one free client may weigh, where all priority clients weigh 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.match not in ("loss", "accuracy") or self.match_on not in ("heldout", "train"):
            raise FedalignError("match is 'loss' or 'accuracy', and match-on is 'heldout' or 'train'")
        if self.rule not in RULES:
            raise FedalignError(f"rule is {self.rule!r}; {nearest(self.rule, RULES)}")
        for name in ("model", "data"):
            if getattr(self, name).count(":") != 1:
                raise FedalignError(f"{name} must be package.module:function, not {getattr(self, name)!r}")
        if not 0 < self.quorum <= 1:
            raise FedalignError(f"quorum must be above 0 and at most 1, not {self.quorum}")
        for name, least in (("rounds", 1), ("timeout", 0.1), ("wait", 0), ("repeats", 0), ("longest", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise FedalignError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not self.free_cap > 0:
            raise FedalignError(f"free-cap must be positive, not {self.free_cap}")
        self.local().check(self.rounds)
        self.make_rule().check(self.rounds)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Settings:
        """Read Flower's run configuration.

        >>> Settings.read({"model": "app.task:model", "data": "app.task:data", "batch-size": 20}).batch_size
        20
        """
        known = settings_of(cls)
        given: dict[str, Any] = {}
        for key, value in config.items():
            name = key.replace("-", "_")
            if name not in known:
                raise FedalignError(f"unknown setting {key!r}; {nearest(key, [k.replace('_', '-') for k in known])}")
            given[name] = check_type(key, value, known[name].annotation)
        for name in ("model", "data"):
            if name not in given:
                raise FedalignError(f"the setting {name} is missing: it names a function, as package.module:function")
        return cls(**given)

    def local(self) -> LocalSGD:
        """Give the clients' local work."""
        return LocalSGD(
            lr=self.lr,
            epochs=self.epochs,
            batch_size=self.batch_size,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            clip=self.clip or None,
            mu=self.mu,
        )

    def make_rule(self) -> Rule:
        """Make the rule; server and clients make the same one."""
        if self.rule == "priority":
            return PriorityOnly()
        if self.rule == "all":
            return Everyone()
        if self.rule == "auto":
            return AutoAlign(on=self.match, match_on=self.match_on, fallback=self.fallback, cosine=self.cosine)
        return Align(self.epsilon, self.match, self.match_on)


def function(reference: str) -> Callable[..., Any]:
    """Import ``package.module:function``."""
    module, _, name = reference.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise FedalignError(f"cannot import {module!r} of {reference!r}: {error}") from error
    except AttributeError as error:
        raise FedalignError(f"{module!r} has no {name!r}, which {reference!r} names") from error
    if not callable(found):
        raise FedalignError(f"{reference!r} is not a function")
    return found  # type: ignore[no-any-return]
