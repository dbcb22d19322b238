"""Finds minimisers of weighted sums of convex objectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedalign.errors import FedalignError

if TYPE_CHECKING:
    from fedalign.theory.objectives import Objective

Array = npt.NDArray[np.float64]
_SOLVED = 1e-10  # tolerance for the gradient at a minimiser


def minimise(objectives: Sequence[Objective], weights: Array) -> Array:
    """Return the w that minimises ``Σ weights[i]·objectives[i]``.

    Quadratic objectives are solved in closed form, others by a trust-region method of scipy. Raises
    :class:`FedalignError` if scipy is not installed, or if its solution is not accurate enough.
    """
    first = objectives[0]
    if first.quadratic:
        hessian = sum(p * o.hessian(o.x[0]) for o, p in zip(objectives, weights, strict=True))
        slope = sum(p * o.gradient(np.zeros(o.size)) for o, p in zip(objectives, weights, strict=True))
        solved: Array = -np.linalg.solve(hessian, slope)
        return solved
    try:
        from scipy.optimize import minimize
    except ImportError as error:
        raise FedalignError(
            "this model's minimiser needs scipy: install it with pip install 'fedalign[theory]'"
        ) from error

    def total(name: str, w: Array) -> Array:
        parts: Array = sum(p * getattr(o, name)(w) for o, p in zip(objectives, weights, strict=True))
        return parts

    found = minimize(
        lambda w: float(total("value", w)),
        np.zeros(first.size),
        jac=lambda w: total("gradient", w),
        hess=lambda w: total("hessian", w),
        method="trust-exact",
        options={"gtol": _SOLVED, "maxiter": 500},
    )
    left = float(np.abs(total("gradient", found.x)).max())
    if left > 1e3 * _SOLVED:  # rounding can stop the solver a little above its tolerance
        raise FedalignError(f"no minimiser was found: the gradient is still {left:.1e}")
    solution: Array = found.x
    return solution
