"""An experiment: checked settings, and the objects and runs that they describe."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedalign.attacks.adversary import Adversary
from fedalign.attacks.settings import make_adversary
from fedalign.callbacks import Callback
from fedalign.data.federation import Federation
from fedalign.errors import FedalignError
from fedalign.experiments.additions import seed_list
from fedalign.experiments.arms import arm_table, make_rule
from fedalign.experiments.federations import federation_of
from fedalign.experiments.start import read_weights, with_weights
from fedalign.metrics.metric import Metric, make_metrics
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
from fedalign.rules.baselines import Alone
from fedalign.rules.rule import Rule
from fedalign.rules.verified import with_trust
from fedalign.settings.validation import options_of
from fedalign.simulation.spec import RunSpec
from fedalign.tracking.guard import Guarded
from fedalign.training.losses import PerSampleLoss
from fedalign.training.optimizer import LocalOptimizer
from fedalign.training.participation import Participation
from fedalign.training.schedules import Theory

if TYPE_CHECKING:
    from fedalign.theory.callback import TheoryCallback


class Experiment:
    """Checked settings, and the runs they describe; :func:`fedalign.experiments.config.load` makes one.

    ``folder`` is where users' own modules are looked for first: the folder of the settings file. Rules, local work,
    data, participation and the server's optimiser are made here, so that a bad option is refused before any work.
    """

    def __init__(self, settings: dict[str, Any], folder: Path | None = None) -> None:
        self.settings = settings
        self.folder = folder
        self.name: str = settings["name"]
        self.rounds: int = settings["rounds"]
        self.arms: list[str] = settings["arms"]
        self.seeds = seed_list(settings["seeds"])
        self._data = DATA.make(settings["data"], folder)
        # Found once, so that it travels to Ray's workers, which may not have the user's file.
        self._make_model = MODELS.find(settings["model"]["kind"], folder)
        self._start = read_weights(settings["start"]) if settings["start"] else None
        self.participation: Participation = PARTICIPATION.make(settings["participation"], folder)
        self._server = SERVER_OPTIMIZERS.make(settings["server"], folder)
        loss = settings["loss"]
        self.loss: PerSampleLoss = LOSSES.make({"kind": loss} if isinstance(loss, str) else loss, folder)
        adversary = settings.get("adversary")
        self.adversary: Adversary | None = None if adversary is None else make_adversary(adversary, folder)
        self.device: str = settings["device"]
        self.tf32: bool = settings["tf32"]
        self.trackers: list[dict[str, Any]] = settings["trackers"]
        self._theory: dict[tuple[int, float], tuple[TheoryCallback | None, Federation]] = {}
        for arm in {*self.arms, *settings.get("arm", {})}:
            self._rule(arm)
            if not isinstance(self.local(arm).schedule, Theory):
                self.local(arm).check(self.rounds)

    @cached_property
    def aggregator(self) -> Any:
        """The server's way to combine updates."""
        return AGGREGATORS.make(self.settings["aggregator"], self.folder)

    @cached_property
    def client_steps(self) -> tuple[Any, ...]:
        """What clients do to their updates before they send them, in order."""
        return tuple(CLIENT_STEPS.make(table, self.folder) for table in self.settings["client_steps"])

    @cached_property
    def server_steps(self) -> tuple[Any, ...]:
        """What the server does to updates before it aggregates them, in order."""
        return tuple(SERVER_STEPS.make(table, self.folder) for table in self.settings["server_steps"])

    def make_trackers(self) -> list[Callback]:
        """Make the trackers of one run."""
        return [Guarded(TRACKERS.make(table, self.folder), table["kind"]) for table in self.trackers]

    def make_callbacks(self) -> list[Callback]:
        """Make the callbacks of one run, such as early stopping."""
        return [CALLBACKS.make(table, self.folder) for table in self.settings["callbacks"]]

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """The metrics that are measured after every round."""
        return make_metrics(self.settings["metrics"], self.folder)

    def model(self) -> nn.Module:
        """Make the experiment's model, initialised by torch's random numbers."""
        model: nn.Module = MODELS.build(self._make_model, self.settings["model"])
        return with_weights(model, self._start) if self._start is not None else model

    def engine_options(self) -> dict[str, Any]:
        """Return how runs are computed, as options of :class:`~fedalign.simulation.simulation.Simulation`."""
        chunk = self.settings["chunk"] or None  # 0: chosen by the engine
        return {"loss": self.loss, "tf32": self.tf32, "engine": self.settings["engine"], "chunk": chunk}

    def federation(self, seed: int) -> Federation:
        """Make a seed's federation."""
        return federation_of(self._data, seed, self.settings["data"]["kind"])

    def specs(self) -> list[tuple[str, int, RunSpec]]:
        """Describe every run: arm, seed and specification. All arms of a seed share its federation."""
        federations = {seed: self.federation(seed) for seed in self.seeds}
        return [(arm, seed, self.spec(arm, seed, federations[seed])) for arm in self.arms for seed in self.seeds]

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

    def spec(self, arm: str, seed: int, federation: Federation) -> RunSpec:
        """Describe the run of an arm and a seed on the seed's federation."""
        warmup = self._arm(arm).get("warmup", self.settings["warmup"])
        local, theory = self.local(arm), None
        if self.settings["theory"] or isinstance(local.schedule, Theory):
            local, theory = self._in_theory(federation, local)
        rule = self._rule(arm)
        return RunSpec(
            federation,
            rule,
            self.rounds,
            warmup,
            local,
            self.participation,
            seed,
            server=self._server,
            aggregator=self.aggregator,
            client_steps=self.client_steps,
            server_steps=self.server_steps,
            adversary=self.adversary,
            free_cap=self.settings["free_cap"],
            free_total=self.settings["free_total"],
            callbacks=[] if theory is None or isinstance(rule, Alone) else [theory.for_run()],
            name=arm,
            metrics=self.metrics,
            experiment=self.name,
            settings=self.settings,
        )

    def _in_theory(self, federation: Federation, local: LocalOptimizer) -> tuple[LocalOptimizer, TheoryCallback | None]:
        """Bind the theorems' learning rate to the federation; there is no callback where an assumption fails."""
        from fedalign.theory.callback import TheoryCallback
        from fedalign.theory.setting import setting_of

        key = (id(federation), getattr(local, "mu", 0.0))  # what arms may change, the rate aside
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
        return arm_table(self.settings, arm)

    def _rule(self, arm: str) -> Rule | Alone:
        usual = {key: self.settings[key] for key in ("epsilon", "match", "match_on")}
        rule = make_rule(self._arm(arm), usual, self.folder)
        if isinstance(rule, Rule):
            rule = with_trust(rule, self._arm(arm).get("trust", self.settings["trust"]))
            rule.check(self.rounds)
        return rule
