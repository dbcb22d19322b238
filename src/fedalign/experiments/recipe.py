"""The part of an experiment's settings that a simulation and a run over Flower share: all but data and clients.

A table is checked by :func:`resolve_recipe`, and :class:`Recipe` makes the objects that it describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from fedalign.aggregation.aggregator import Aggregator
from fedalign.aggregation.update_steps import ClientStep, ServerStep
from fedalign.callbacks import Callback
from fedalign.errors import FedalignError
from fedalign.experiments.arms import arm_table, make_rule, trains_alone
from fedalign.ledger.ledger import Ledger
from fedalign.ledger.settings import make_ledger, resolve_ledger
from fedalign.metrics.metric import Metric, make_metrics, resolve_metrics
from fedalign.personal.method import PersonalMethod
from fedalign.personal.settings import make_methods, resolve_personal
from fedalign.registry import (
    AGGREGATORS,
    CALLBACKS,
    CLIENT_STEPS,
    LOCAL_OPTIMIZERS,
    LOSSES,
    PARTICIPATION,
    SERVER_OPTIMIZERS,
    SERVER_STEPS,
    TRACKERS,
)
from fedalign.rules.baselines import Alone
from fedalign.rules.rule import Rule
from fedalign.rules.trust import with_trust
from fedalign.settings.validation import options_of
from fedalign.tracking.guard import Guarded, Report, warn
from fedalign.training.losses import PerSampleLoss
from fedalign.training.optimizer import LocalOptimizer
from fedalign.training.participation import Participation
from fedalign.training.server import ServerOptimizer

_LISTS = {"client_steps": CLIENT_STEPS, "server_steps": SERVER_STEPS, "callbacks": CALLBACKS}


def resolve_recipe(table: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Check the sections of an experiment that a run over Flower has, too, and fill in every default.

    Users' own modules are looked for in ``folder`` first. Raises :class:`FedalignError` for whatever is wrong.

    >>> resolve_recipe({"local": {"lr": 0.1, "epochs": 5}, "aggregator": "median"})["aggregator"]
    {'kind': 'median'}
    """
    loss = LOSSES.resolve("loss", table.get("loss", "cross-entropy"), folder)
    local = table["local"]
    local = {"kind": "sgd", **local} if isinstance(local, Mapping) else local  # runs of version 0.1 have no kind
    found: dict[str, Any] = {
        "loss": loss["kind"] if loss.keys() == {"kind"} else loss,
        "local": LOCAL_OPTIMIZERS.resolve("local", local, folder),
        "participation": PARTICIPATION.resolve("participation", table.get("participation", "full"), folder),
        "server": SERVER_OPTIMIZERS.resolve("server", table.get("server", "fedavg"), folder),
        "aggregator": AGGREGATORS.resolve("aggregator", table.get("aggregator", "mean"), folder),
    }
    for key, registry in _LISTS.items():
        found[key] = registry.resolve_all(key, table.get(key, []), folder)
    found["trackers"] = [  # two names of one setting
        tracker for key in ("trackers", "track") for tracker in TRACKERS.resolve_all(key, table.get(key, []), folder)
    ]
    found["metrics"] = resolve_metrics(table.get("metrics", {}), folder)
    if "personal" in table:
        found["personal"] = resolve_personal(table["personal"], folder)
    if table.get("ledger", False) is not False:
        found["ledger"] = resolve_ledger(table["ledger"], folder)
    return found


class Recipe:
    """Checked settings, and the objects that they describe; ``folder`` is where users' own modules are looked for.

    What every run has is made at once, so that a bad option is refused before any work.
    """

    def __init__(self, settings: dict[str, Any], folder: Path | None = None) -> None:
        self.settings, self.folder = settings, folder
        self.server: ServerOptimizer | None = SERVER_OPTIMIZERS.make(settings["server"], folder)
        loss = settings["loss"]
        self.loss: PerSampleLoss = LOSSES.make({"kind": loss} if isinstance(loss, str) else loss, folder)
        self.trackers: list[dict[str, Any]] = settings["trackers"]

    @cached_property
    def participation(self) -> Participation:
        """Who takes part in a round. It may read a file, which the nodes of a real federation do not have."""
        made: Participation = PARTICIPATION.make(self.settings["participation"], self.folder)
        return made

    @cached_property
    def aggregator(self) -> Aggregator:
        """The server's way to combine updates."""
        made: Aggregator = AGGREGATORS.make(self.settings["aggregator"], self.folder)
        return made

    @cached_property
    def client_steps(self) -> tuple[ClientStep, ...]:
        """What clients do to their updates before they send them, in order."""
        return tuple(CLIENT_STEPS.make(table, self.folder) for table in self.settings["client_steps"])

    @cached_property
    def server_steps(self) -> tuple[ServerStep, ...]:
        """Which updates of free clients the server refuses, in order."""
        return tuple(SERVER_STEPS.make(table, self.folder) for table in self.settings["server_steps"])

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """The metrics that are measured after every round."""
        return make_metrics(self.settings["metrics"], self.folder)

    def ledger(self, arm: str) -> Ledger | None:
        """Return the ledger of an arm: that of the section, unless the arm says otherwise; None: it keeps none."""
        if not self._arm(arm).get("ledger", "ledger" in self.settings):
            return None
        return make_ledger(self.settings.get("ledger") or resolve_ledger(True), self.folder)

    def make_trackers(self, report: Report = warn) -> list[Callback]:
        """Make the trackers of one run; ``report`` is told if one fails."""
        return [Guarded(TRACKERS.make(table, self.folder), table["kind"], report) for table in self.trackers]

    def make_callbacks(self) -> list[Callback]:
        """Make the callbacks of one run, such as early stopping."""
        return [CALLBACKS.make(table, self.folder) for table in self.settings["callbacks"]]

    def local(self, arm: str) -> LocalOptimizer:
        """Describe an arm's local work."""
        table = self.settings["local"]
        own = {key: value for key, value in self._arm(arm).items() if key in ("lr", "mu")}
        known = options_of(LOCAL_OPTIMIZERS.find(table["kind"], self.folder))
        for key in own:
            if key not in known:
                raise FedalignError(f"arm.{arm}.{key} is set, but the local optimiser {table['kind']!r} has no {key}")
        made: LocalOptimizer = LOCAL_OPTIMIZERS.make({**table, **own}, self.folder)
        return made

    def personal(self, arm: str) -> dict[str, PersonalMethod]:
        """Make the methods by which an arm's clients make personal models of the final one: none by default.

        An arm that trains every client alone has no such model, so it has no methods.
        """
        own = self._arm(arm).get("personal")
        if trains_alone(self.settings, arm):
            if own:
                raise FedalignError(
                    f"arm.{arm}.personal is set, but the arm has no shared model: it trains every client alone"
                )
            return {}
        usual = self.settings.get("personal")
        table = resolve_personal(own, self.folder, f"arm.{arm}.personal") if own is not None else usual
        return {} if table is None else make_methods(table, self.folder)

    @property
    def saves_personal(self) -> bool:
        """Whether the personal models are written, not only their figures."""
        return bool(self.settings.get("personal", {}).get("save", False))

    def warmup(self, arm: str) -> float:
        """Return an arm's warm-up: a fraction of the rounds, or a whole number of them."""
        warmup: float = self._arm(arm).get("warmup", self.settings["warmup"])
        return warmup

    def rule(self, arm: str, usual: Mapping[str, Any] | None = None, cosine: float | None = None) -> Rule | Alone:
        """Make an arm's rule, with its setting of trust applied to it.

        ``usual`` are further options for rules that have them, where the arm does not set them. ``cosine`` is that of
        the verified rule which ``trust="verify"`` makes of another one.
        """
        shared = {key: self.settings[key] for key in ("epsilon", "match", "match_on")}
        rule = make_rule(self._arm(arm), {**shared, **(usual or {})}, self.folder)
        if not isinstance(rule, Rule):
            return rule
        own = {} if cosine is None else {"cosine": cosine}
        trusted = with_trust(rule, self._arm(arm).get("trust", self.settings["trust"]), **own)
        trusted.check(self.settings["rounds"])
        return trusted

    def _arm(self, arm: str) -> dict[str, Any]:
        return arm_table(self.settings, arm)
