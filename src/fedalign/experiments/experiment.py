"""An experiment: checked settings, and the objects and runs that they describe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedalign.attacks.adversary import Adversary
from fedalign.attacks.settings import make_adversary
from fedalign.data.federation import Federation
from fedalign.errors import FedalignError
from fedalign.experiments.additions import seed_list
from fedalign.experiments.federations import federation_of
from fedalign.experiments.recipe import Recipe
from fedalign.experiments.start import read_weights, with_weights
from fedalign.registry import DATA, MODELS
from fedalign.rules.baselines import Alone
from fedalign.simulation.spec import RunSpec
from fedalign.training.optimizer import LocalOptimizer
from fedalign.training.schedules import Theory

if TYPE_CHECKING:
    from fedalign.theory.callback import TheoryCallback


class Experiment(Recipe):
    """Checked settings, and the runs they describe; :func:`fedalign.experiments.config.load` makes one.

    ``folder`` is where users' own modules are looked for first: the folder of the settings file. Rules, local work,
    data, participation and the server's optimiser are made here, so that a bad option is refused before any work.
    """

    def __init__(self, settings: dict[str, Any], folder: Path | None = None) -> None:
        super().__init__(settings, folder)
        self.name: str = settings["name"]
        self.rounds: int = settings["rounds"]
        self.arms: list[str] = settings["arms"]
        self.seeds = seed_list(settings["seeds"])
        _ = self.participation
        self._data = DATA.make(settings["data"], folder)
        # Found once, so that it travels to Ray's workers, which may not have the user's file.
        self._make_model = MODELS.find(settings["model"]["kind"], folder)
        self._start = read_weights(settings["start"]) if settings["start"] else None
        adversary = settings.get("adversary")
        self.adversary: Adversary | None = None if adversary is None else make_adversary(adversary, folder)
        self.device: str = settings["device"]
        self.tf32: bool = settings["tf32"]
        self._theory: dict[tuple[int, float], tuple[TheoryCallback | None, Federation]] = {}
        for arm in {*self.arms, *settings.get("arm", {})}:
            self.rule(arm)
            self.personal(arm)
            self.ledger(arm)
            if not isinstance(self.local(arm).schedule, Theory):
                self.local(arm).check(self.rounds)

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

    def spec(self, arm: str, seed: int, federation: Federation) -> RunSpec:
        """Describe the run of an arm and a seed on the seed's federation."""
        local, theory = self.local(arm), None
        if self.settings["theory"] or isinstance(local.schedule, Theory):
            local, theory = self._in_theory(federation, local)
        rule = self.rule(arm)
        return RunSpec(
            federation,
            rule,
            self.rounds,
            self.warmup(arm),
            local,
            self.participation,
            seed,
            server=self.server,
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
            personal=self.personal(arm),
            keep_personal=self.saves_personal,
            ledger=self.ledger(arm),
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
