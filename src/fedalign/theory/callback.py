"""The callback that adds the theory's figures to every round's record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fedalign.callbacks import Callback, RunInfo
from fedalign.protocol.records import RoundRecord
from fedalign.simulation.engine.layout import Layout
from fedalign.theory.bounds import bias_of
from fedalign.theory.constants import Constants
from fedalign.theory.setting import Setting
from fedalign.training.schedules import InverseTime


class TheoryCallback(Callback):
    """Adds F(w) with its regulariser, and the running ρ_T, to the records of one run.

    Of the ``constants``, μ, L, γ and Γ_k are used. They do not depend on where a run starts.
    """

    changes_records = True

    def __init__(self, setting: Setting, constants: Constants | None = None) -> None:
        self._setting = setting
        self._constants = constants or setting.constants(np.zeros(setting.problem.size))
        self._last: RoundRecord | None = None

    def for_run(self) -> TheoryCallback:
        """Return a callback for another run of the same federation; the constants are not computed again."""
        return TheoryCallback(self._setting, self._constants)

    @property
    def rate(self) -> InverseTime:
        """η_t = 2/(μ(t + γ)) with the federation's own μ and γ."""
        return InverseTime(self._constants.mu, self._constants.gamma)

    def on_start(self, run: RunInfo) -> None:
        """Go on from the record of the round before, if there is one."""
        self._last = run.last

    def on_round(self, record: RoundRecord, model: Any) -> RoundRecord:
        """Compute the objective of the served model and ρ_T."""
        c, E, last = self._constants, self._setting.local_steps, self._last
        ahead = c.mu / (2 * c.L)  # ρ_T = 1/ahead · Σ bias / (T + γ − 2)
        T = (record.round + 1) * E
        total = last.rho * ahead * (T - E + c.gamma - 2) if last is not None and last.rho is not None else 0.0
        rho = (total + E * bias_of(record, c.gaps)) / ahead / (T + c.gamma - 2)
        # The weights in the record are the served model's. If another model is trained on, they don't tell its bias.
        known = not record.base and (last is None or last.rho is not None)
        objective = self._setting.problem.value(self._setting.weights(Layout(model).flatten(model)))
        self._last = replace(record, objective=objective, rho=rho if known else None)
        return self._last
