"""Compares the runs of an experiment with the theory: θ_T, ρ_T and the bound of each arm beside its measured error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedalign.errors import FedalignError
from fedalign.protocol.records import History
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.spec import ModelFactory, RunSpec, initial_module
from fedalign.theory.bounds import Bounds, bounds, path_of
from fedalign.theory.constants import Constants
from fedalign.theory.exact import Expected, expected
from fedalign.theory.minimise import Array
from fedalign.theory.objectives import LeastSquares
from fedalign.theory.setting import Setting, check_rate, holds_for, setting_of

_POINTS = 60  # stored per curve


def summarise(
    settings: Mapping[str, Any],
    runs: Sequence[tuple[str, int, RunSpec]],
    histories: Mapping[str, Mapping[int, History]],
    model: ModelFactory,
) -> dict[str, Any]:
    """Return the comparison of every arm, as ``summary.json`` stores it.

    An arm without a bound has only the key ``fails``, which names the assumption that fails; so has the result if the
    same assumption fails for all arms.
    """
    found: dict[str, Any] = {"arms": {}}
    for arm in dict.fromkeys(arm for arm, _, _ in runs):
        complete = [(seed, spec) for a, seed, spec in runs if a == arm and len(histories[arm][seed]) == spec.rounds]
        if not complete:
            continue
        try:
            found["arms"][arm] = _arm(settings, complete, histories[arm], model)
        except FedalignError as error:
            found["arms"][arm] = {"fails": str(error)}
    reasons = {figures.get("fails") for figures in found["arms"].values()}
    if len(reasons) == 1 and None not in reasons:
        return {"fails": reasons.pop()}
    return found


def _arm(
    settings: Mapping[str, Any],
    runs: Sequence[tuple[int, RunSpec]],
    histories: Mapping[int, History],
    model: ModelFactory,
) -> dict[str, Any]:
    if not holds_for(runs[0][1].rule):
        raise FedalignError("the theorems are about rules that decide before clients train")
    errors: list[Array] = []
    found: list[tuple[Constants, Bounds]] = []
    exact: list[Expected] = []
    known: dict[int, Setting] = {}
    paths: dict[tuple[int, bytes, bytes], Expected | None] = {}  # many seeds make the same decisions
    for seed, spec in runs:
        if id(spec.federation) not in known:
            known[id(spec.federation)] = setting_of(settings, spec.federation, spec.local)
        setting = known[id(spec.federation)]
        history = histories[seed]
        module = initial_module(model, seed)
        start = setting.weights(Layout(module).flatten(module))
        first = setting.problem.value(start)
        values = np.array([first, *(float(r.objective or math.nan) for r in history.rounds)])
        error = values - setting.problem.value(setting.problem.minimiser)
        # By strong convexity, the error of a model bounds its distance from w*.
        radius = math.sqrt(2 * float(np.max(error)) / min(o.curvature()[0] for o in setting.problem.objectives))
        c = setting.constants(start, radius)
        check_rate(spec.local, c)
        key = id(setting), start.tobytes(), _included(history).tobytes()
        if key not in paths:
            paths[key] = _exact(setting, history, start, c)
        if (known_path := paths[key]) is not None:
            exact.append(known_path)
            c = setting.constants(start, moments=(known_path.sigma2, known_path.G2))
        errors.append(error)
        found.append((c, bounds(c, *path_of(history, c.gaps))))
    used = [r.epsilon if r.epsilon is not None else 0.0 for r in histories[runs[0][0]].rounds]
    ends: list[float | str] = ["inf" if e == math.inf else e for e in (used[0], used[-1])]  # JSON has no infinity
    return {"epsilon": ends, **_figures(errors, found, exact if len(paths) == 1 else [])}


def _exact(setting: Setting, history: History, start: Array, c: Constants) -> Expected | None:
    if setting.draws is not None or not isinstance(setting.problem.objectives[0], LeastSquares):
        return None
    return expected(setting.problem, _included(history), start, setting.local_steps, c.rate, setting.batch)


def _included(history: History) -> Any:
    return np.array([[c.decision == "admitted" for c in r.clients] for r in history.rounds])


def _figures(
    errors: Sequence[Array], found: Sequence[tuple[Constants, Bounds]], exact: Sequence[Expected]
) -> dict[str, Any]:
    c = found[0][0]
    means = {
        name: np.mean([getattr(b, name) for _, b in found], axis=0)
        for name in ("T", "theta", "rho", "printed", "corrected", "recursion")
    }
    means["error"] = np.mean(errors, axis=0)
    if exact:
        means["exact"] = np.mean([e.errors for e in exact], axis=0)
    spread = np.std(errors, axis=0, ddof=1) if len(errors) > 1 else np.zeros_like(errors[0])
    means["error_std"] = spread
    kept = np.unique(np.geomspace(1, len(means["T"]), _POINTS).astype(int)) - 1
    return {
        **{name: float(values[-1]) for name, values in means.items()},
        "ratio": float(means["corrected"][-1] / means["error"][-1]) if means["error"][-1] > 0 else None,
        "smallest_ratio": float(np.min(means["corrected"][1:] / np.maximum(means["error"][1:], 1e-300))),
        "constants": {
            "L": c.L, "mu": c.mu, "gamma": c.gamma, "E": c.local_steps, "Gamma": c.heterogeneity,
            "Gamma_k": list(c.gaps), "sigma2": c.sigma2, "G2": c.G2, "distance": c.distance, "minimum": c.minimum,
            "C1": c.c1(), "C2": c.c2,
        },
        "curves": {name: [float(f"{v:.6g}") for v in values[kept]] for name, values in means.items()},
    }  # fmt: skip
