"""The settings of a run, which Flower's run configuration gives to the server and to every client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedalign.aggregation.aggregator import Aggregator
from fedalign.aggregation.length_bound import LengthBound
from fedalign.aggregation.update_steps import ClientStep, ServerStep
from fedalign.callbacks import Callback
from fedalign.errors import FedalignError, nearest
from fedalign.experiments.arms import make_rule, resolve_rule
from fedalign.metrics.metric import Metric, make_metrics, resolve_metrics
from fedalign.registry import AGGREGATORS, CALLBACKS, CLIENT_STEPS, LOCAL_OPTIMIZERS, LOSSES, SERVER_STEPS, TRACKERS
from fedalign.rules.rule import Rule
from fedalign.rules.verified import Verified, with_trust
from fedalign.settings.typed_values import check_type
from fedalign.settings.user_modules import find
from fedalign.settings.validation import check_given, options_of
from fedalign.tracking.guard import Guarded, Report, warn
from fedalign.training.losses import PerSampleLoss
from fedalign.training.optimizer import LocalOptimizer


@dataclass(frozen=True)
class Settings:
    """What ``[tool.flwr.app.config]`` may hold, with ``-`` for ``_`` in names.

    ``model`` and ``data`` name functions, as ``package.module:function``. ``rule``, ``loss`` and ``optimizer`` are
    built-in names or ``package.module:Name``, with options as in ``fedalign(epsilon=0.3)``; further settings such as
    ``epsilon`` and ``lr`` are for rules and optimisers that have such an option. Paths are on the server's machine.
    """

    model: str
    data: str
    rounds: int = 50
    warmup: float = 0.1
    rule: str = "fedalign"
    epsilon: float = 0.2
    match: Literal["loss", "accuracy"] = "loss"
    match_on: Literal["heldout", "train"] = "heldout"
    trust: Literal["report", "verify"] = "verify"  #: `report`: believe what free clients report
    fallback: bool = True  #: for the rule `auto` with the trust `report`; verified rules always have one
    cosine: float = -0.1  #: for the rule `auto` and for verified rules
    loss: str = "cross-entropy"
    optimizer: str = "sgd"  #: for the clients' local work
    aggregator: str = "mean"  #: how the server combines updates
    client_steps: str = ""  #: what clients do with updates before they send them; several with `;` between
    server_steps: str = ""  #: which free clients' updates the server refuses, besides `longest`
    trackers: str = ""  #: where the server writes curves, such as `tensorboard; mlflow`
    track: str = ""  #: another name of `trackers`
    callbacks: str = ""  #: other callbacks on the server, such as `early-stopping(patience=5)`
    metrics: str = ""  #: what clients compute on their data after every round, such as `f1; recall(on='heldout')`
    lr: float = 0.1
    epochs: int = 1
    batch_size: int = 50
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
    wait: float = 120.0  #: seconds to wait at the start, and before a repeated round, for the quorum
    quorum: float = 1.0  #: the fraction of the priority clients' weight that must answer
    repeats: int = 3  #: how often a round without a quorum is repeated before the run pauses
    longest: float = 10.0  #: refuse a free update more than this many times the longest priority update; 0: never
    free_cap: float = 1.0  #: the largest weight of one free client; all priority clients together have weight 1
    free_total: float = 0.0  #: the largest weight of all admitted free clients together; 0: no cap
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.match not in ("loss", "accuracy") or self.match_on not in ("heldout", "train"):
            raise FedalignError("match is 'loss' or 'accuracy', and match-on is 'heldout' or 'train'")
        for name in ("model", "data"):
            if getattr(self, name).count(":") != 1:
                raise FedalignError(f"{name} must be package.module:function, not {getattr(self, name)!r}")
        if not 0 < self.quorum <= 1:
            raise FedalignError(f"quorum must be above 0 and at most 1, not {self.quorum}")
        lowest = {"rounds": 1, "timeout": 0.1, "wait": 0, "repeats": 0, "longest": 0, "seed": 0, "free_total": 0}
        for name, least in lowest.items():
            if not getattr(self, name) >= least:
                raise FedalignError(f"{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}")
        if not self.free_cap > 0:
            raise FedalignError(f"free-cap must be positive, not {self.free_cap}")
        self.local().check(self.rounds)
        self.make_rule().check(self.rounds)
        self.make_loss()
        self.make_aggregator()
        self.make_client_steps()
        self.make_server_steps()
        self.make_metrics()

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Settings:
        """Read Flower's run configuration.

        >>> Settings.read({"model": "app.task:model", "data": "app.task:data", "batch-size": 20}).batch_size
        20
        """
        known = options_of(cls)
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

    def local(self) -> LocalOptimizer:
        """Make the clients' local work; a setting that the optimiser has no option for is refused."""
        where, name, options = LOCAL_OPTIMIZERS.split("optimizer", self.optimizer)
        known = options_of(LOCAL_OPTIMIZERS.find(name, where=where))
        usual: dict[str, Any] = {
            "lr": self.lr,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "clip": self.clip or None,
            "mu": self.mu,
        }
        if "steps" in options:
            del usual["epochs"]
        if not self.weight_decay:
            del usual["weight_decay"]  # then the optimiser has its own default, which is not 0 for AdamW
        for key in [key for key in usual if key not in known]:
            if usual.pop(key):
                raise FedalignError(f"{key.replace('_', '-')} is set, but the optimizer {name!r} has no such option")
        usual |= check_given("optimizer", options, known)
        made: LocalOptimizer = LOCAL_OPTIMIZERS.make({"kind": name, **usual})
        if made.scaffold:
            raise FedalignError("SCAFFOLD runs in simulations alone: nodes over Flower keep no control variates")
        return made

    def make_rule(self) -> Rule:
        """Make the rule; server and clients make the same one."""
        arm = resolve_rule("rule", self.rule)
        usual: dict[str, Any] = {"epsilon": self.epsilon, "match": self.match, "match_on": self.match_on}
        if arm["rule"] in ("auto", "fedalign-verified"):
            usual |= {"fallback": self.fallback, "cosine": self.cosine}
        rule = make_rule(arm, usual)
        if not isinstance(rule, Rule):
            raise FedalignError(f"rule is {self.rule!r}, which has no server; choose a rule that has one")
        trusted = with_trust(rule, self.trust)
        if isinstance(trusted, Verified) and trusted is not rule:
            return replace(trusted, cosine=self.cosine)
        return trusted

    def make_loss(self) -> PerSampleLoss:
        """Make the loss, which gives one number per sample."""
        loss: PerSampleLoss = LOSSES.make(LOSSES.resolve("loss", self.loss))
        return loss

    def make_aggregator(self) -> Aggregator:
        """Make the aggregator that the server combines updates with."""
        made: Aggregator = AGGREGATORS.make(AGGREGATORS.resolve("aggregator", self.aggregator))
        return made

    def make_client_steps(self) -> tuple[ClientStep, ...]:
        """Make the steps that clients apply to their updates before they send them."""
        tables = CLIENT_STEPS.resolve_all("client-steps", self.client_steps)
        return tuple(CLIENT_STEPS.make(table) for table in tables)

    def make_server_steps(self) -> tuple[ServerStep, ...]:
        """Make the server's checks of free clients' updates; ``longest`` is the first of them."""
        tables = SERVER_STEPS.resolve_all("server-steps", self.server_steps)
        bound = (LengthBound(self.longest),) if self.longest else ()
        return (*bound, *(SERVER_STEPS.make(table) for table in tables))

    def make_trackers(self, report: Report = warn) -> list[Callback]:
        """Make the trackers on the server; ``report`` is told if one fails."""
        named = {"trackers": self.trackers, "track": self.track}
        tables = [table for key, text in named.items() for table in TRACKERS.resolve_all(key, text)]
        return [Guarded(TRACKERS.make(table), table["kind"], report) for table in tables]

    def make_callbacks(self) -> list[Callback]:
        """Make the other callbacks that the server tells of every round."""
        return [CALLBACKS.make(table) for table in CALLBACKS.resolve_all("callbacks", self.callbacks)]

    def make_metrics(self) -> dict[str, Metric]:
        """Make the metrics that every client computes on its own data."""
        return make_metrics(resolve_metrics(self.metrics))


def function(reference: str) -> Callable[..., Any]:
    """Return the function that ``package.module:function`` names; raises :class:`FedalignError` if there is none.

    >>> function("math:sqrt")(9.0)
    3.0
    """
    found = find(reference)
    if not callable(found):
        raise FedalignError(f"{reference!r} is not a function")
    return found  # type: ignore[no-any-return]
