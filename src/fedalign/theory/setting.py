"""Translates an experiment into the problem of the theorems, or names the assumption that fails."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedalign.data.federation import Federation
from fedalign.errors import FedalignError
from fedalign.protocol.messages import RoundDone
from fedalign.protocol.records import RoundRecord
from fedalign.rules.align import Align, Everyone, PriorityOnly
from fedalign.rules.rule import Rule
from fedalign.simulation.api import Alone
from fedalign.theory.bounds import bias_of
from fedalign.theory.constants import Constants, constants
from fedalign.theory.minimise import Array
from fedalign.theory.objectives import LeastSquares, Objective, Softmax
from fedalign.theory.problem import Problem
from fedalign.training.local import LocalSGD
from fedalign.training.schedules import InverseTime


@dataclass(frozen=True)
class Setting:
    """A federation as the theorems see it: the objectives, the local work, and the layout of the weights."""

    problem: Problem
    local_steps: int
    batch: int | None
    draws: int | None
    outputs: int
    bias: bool

    def weights(self, flat: Any) -> Array:
        """Reorder the flat weights of a model as the problem has them: for each output its row, then its bias."""
        vector: Array = np.asarray(flat.detach().cpu().double())
        if not self.bias:
            return vector
        rows, bias = vector[: -self.outputs].reshape(self.outputs, -1), vector[-self.outputs :]
        return np.concatenate([rows, bias[:, None]], axis=1).reshape(-1)

    def constants(
        self, start: Array, radius: float | None = None, moments: tuple[float, float] | None = None
    ) -> Constants:
        """Compute the constants of a run that starts at ``start``; see :func:`fedalign.theory.constants`."""
        return constants(self.problem, start, self.local_steps, self.batch, self.draws, radius, moments)


def check_settings(settings: Mapping[str, Any], local: LocalSGD) -> None:
    """Refuse settings under which the theorems never hold; a :class:`FedalignError` names the assumption that fails."""
    kind = settings["model"]["kind"]
    if kind not in ("linear", "logistic"):
        raise FedalignError(f"Assumption 2 (strong convexity) fails: the objective of the model {kind!r} is not convex")
    plain = {"momentum": local.momentum, "mu": local.mu, "clip": local.clip, "scaffold": local.scaffold}
    for name, value in plain.items():
        if value:
            raise FedalignError(f"the theorems are about plain SGD, but local.{name} is {value}")
    if settings["server"]["kind"] != "fedavg":
        raise FedalignError(f"the theorems are about the mean, but server.kind is {settings['server']['kind']!r}")
    if settings["participation"]["kind"] not in ("full", "bernoulli", "replacement"):
        raise FedalignError(
            "the theorems need all priority clients, or draws with replacement (Theorem 2), but participation.kind is "
            f"{settings['participation']['kind']!r}"
        )
    if settings["loss"] == "cross-entropy" and not local.weight_decay:
        raise FedalignError(
            "Assumption 2 (strong convexity) fails: cross-entropy needs a regulariser, and local.weight_decay is 0"
        )


def setting_of(settings: Mapping[str, Any], federation: Federation, local: LocalSGD) -> Setting:
    """Translate the settings and the federation; a :class:`FedalignError` names the assumption that fails."""
    check_settings(settings, local)
    kind, loss, part = settings["model"]["kind"], settings["loss"], settings["participation"]
    steps = {local.steps_for(len(client.train)) for client in federation.clients}
    if len(steps) > 1:
        raise FedalignError(
            f"all clients must make the same number E of local steps, not {sorted(steps)}: set local.steps"
        )
    smallest = min(len(client.train) for client in federation.clients)
    batch = (
        None
        if local.batch_size is None or local.batch_size >= max(len(c.train) for c in federation.clients)
        else local.batch_size
    )
    if batch is not None and not local.fresh and next(iter(steps)) > 1:
        raise FedalignError(
            "Assumption 3 (unbiased gradients) fails: the batches of a pass over the data depend on each other; "
            "set local.fresh = true, or batch_size to the number of samples"
        )
    if batch is not None and batch > smallest:
        raise FedalignError(f"batch_size {batch} is more than some client's {smallest} samples")
    outputs = settings["model"].get("outputs") or settings["model"]["classes"]
    pool = federation.pool
    if not pool.x.dtype.is_floating_point or np.any(np.asarray(pool.mean) != 0) or np.any(np.asarray(pool.std) != 1):
        raise FedalignError("the theory needs features that are not normalised, but the data has a mean or std")
    objectives: list[Objective] = []
    bias = kind == "logistic"
    for client in federation.clients:
        x = pool.x[client.train].numpy().astype(np.float64).reshape(len(client.train), -1)
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1) if bias else x
        y = pool.y[client.train].numpy().astype(np.float64)
        if loss == "squared-error":
            if outputs != 1:
                raise FedalignError(f"least squares is for one output, not {outputs}")
            objectives.append(LeastSquares(x, y.reshape(-1), local.weight_decay))
        else:
            objectives.append(Softmax(x, y, local.weight_decay, outputs))
    roster = federation.roster
    problem = Problem(objectives, np.asarray(roster.priority, bool), np.asarray(roster.p, np.float64))
    return Setting(problem, next(iter(steps)), batch, part.get("draws"), outputs, bias)


def check_rate(local: LocalSGD, c: Constants) -> None:
    """Refuse a learning rate that differs from the one in the theorems."""
    rate = local.schedule
    same = isinstance(rate, InverseTime) and rate.numerator == 2.0
    if not (same and math.isclose(rate.mu, c.mu, rel_tol=1e-6) and math.isclose(rate.gamma, c.gamma, rel_tol=1e-6)):  # type: ignore[attr-defined]
        raise FedalignError(
            f"the learning rate is not that of the theorems: they need η_t = 2/(μ(t+γ)) with μ = {c.mu:.6g} and γ = "
            f'{c.gamma:.6g} (local.lr = {{schedule = "theory"}}), not {rate}'
        )


def holds_for(rule: Rule | Alone) -> bool:
    """Tell whether a rule decides before clients train, as the theorems assume."""
    return isinstance(rule, Align | Everyone | PriorityOnly) and not rule.needs_updates


@dataclass(frozen=True)
class TheoryWatch:
    """Adds F(w) with its regulariser, and ρ_T so far, to the record of every round."""

    setting: Setting
    constants: Constants  #: only μ, L, γ and Γ_k are used, which do not depend on the start of a run

    @classmethod
    def of(cls, setting: Setting) -> TheoryWatch:
        """Make a watch for a setting, with the constants of its federation."""
        return cls(setting, setting.constants(np.zeros(setting.problem.size)))

    @property
    def rate(self) -> InverseTime:
        """The learning rate η_t = 2/(μ(t + γ)) with the constants of this federation."""
        return InverseTime(self.constants.mu, self.constants.gamma)

    def __call__(self, done: RoundDone, last: RoundRecord | None) -> RoundRecord:
        """Return the record of a finished round with ``objective`` and ``rho``; ``last`` is the previous record."""
        record, c, E = done.record, self.constants, self.setting.local_steps
        ahead = c.mu / (2 * c.L)  # ρ_T = 1/ahead · Σ bias / (T + γ − 2)
        T = (record.round + 1) * E
        total = last.rho * ahead * (T - E + c.gamma - 2) if last is not None and last.rho is not None else 0.0
        rho = (total + E * bias_of(record, c.gaps)) / ahead / (T + c.gamma - 2)
        # The weights describe the served model. If training continues from another model, they do not give its bias.
        known = not record.base and (last is None or last.rho is not None)
        objective = self.setting.problem.value(self.setting.weights(done.model))
        return replace(record, objective=objective, rho=rho if known else None)
