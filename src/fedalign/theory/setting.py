"""Translates an experiment into the problem of the theorems, or names the assumption that fails."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedalign.data.federation import Federation
from fedalign.errors import FedalignError
from fedalign.rules.align import Align
from fedalign.rules.baselines import Alone, Everyone, PriorityOnly
from fedalign.rules.rule import Rule
from fedalign.theory.constants import Constants, constants
from fedalign.theory.minimise import Array
from fedalign.theory.objectives import LeastSquares, Objective, Softmax
from fedalign.theory.problem import Problem
from fedalign.training.local import LocalSGD
from fedalign.training.optimizer import LocalOptimizer
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


def check_settings(settings: Mapping[str, Any], local: LocalOptimizer) -> None:
    """Refuse settings under which the theorems never hold; a :class:`FedalignError` names the assumption that fails."""
    kind = settings["model"]["kind"]
    if kind not in ("linear", "logistic"):
        raise FedalignError(f"Assumption 2 (strong convexity) fails: the objective of the model {kind!r} is not convex")
    for section, plain in (("local", "sgd"), ("aggregator", "mean")):
        given = settings[section]["kind"]
        if given != plain:
            raise FedalignError(f"the theorems are about {plain!r}, but {section}.kind is {given!r}")
    for cap in ("free_cap", "free_total"):
        if settings.get(cap, math.inf) < math.inf:
            raise FedalignError(f"the theorems are about the weights p_k, but {cap} = {settings[cap]} changes them")
    if settings["loss"] not in ("cross-entropy", "squared-error"):
        raise FedalignError(f"the theorems' constants are known for the built-in losses, not for {settings['loss']!r}")
    if not isinstance(local, LocalSGD):
        raise FedalignError(f"the theorems are about plain SGD, not {type(local).__name__}")
    options = {"momentum": local.momentum, "mu": local.mu, "clip": local.clip, "scaffold": local.scaffold}
    for name, value in options.items():
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


def setting_of(settings: Mapping[str, Any], federation: Federation, local: LocalOptimizer) -> Setting:
    """Translate the settings and the federation; a :class:`FedalignError` names the assumption that fails."""
    check_settings(settings, local)
    kind, loss, part = settings["model"]["kind"], settings["loss"], settings["participation"]
    steps = {local.steps_for(len(client.train)) for client in federation.clients}
    if len(steps) > 1:
        raise FedalignError(
            f"all clients must make the same number E of local steps, not {sorted(steps)}: set local.steps"
        )
    smallest = min(len(client.train) for client in federation.clients)
    batch = None if local.batch is None or local.batch >= max(len(c.train) for c in federation.clients) else local.batch
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


def check_rate(local: LocalOptimizer, c: Constants) -> None:
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
