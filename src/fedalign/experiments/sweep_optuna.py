"""Points of a sweep that Optuna proposes, in batches that are simulated together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from fedalign.errors import FedalignError
from fedalign.experiments.sweep_space import Choice, Point, Range

BATCH = 8  #: points that are proposed at once


def check_search(axes: Sequence[Choice | Range], number: int) -> Any:
    """Return the module optuna; raises :class:`FedalignError` without it, and if there is nothing to search."""
    if number < 1:
        raise FedalignError(f"--optuna must be at least 1, not {number}")
    if not axes:
        raise FedalignError("a sweep varies at least one setting, as in --set local.lr=0.01..0.3:log")
    try:
        import optuna
    except ImportError as error:
        raise FedalignError("Optuna is not installed: pip install 'fedalign[optuna]'") from error
    return optuna


def search(
    axes: Sequence[Choice | Range],
    number: int,
    maximise: bool,
    evaluate: Callable[[list[Point]], list[float | None]],
) -> None:
    """Let Optuna propose ``number`` points in batches; ``evaluate`` gives a value for each, None if it diverged.

    Proposals depend on the earlier values alone: a sweep that is resumed gets the same ones again, and a larger
    ``number`` goes on from there. Raises :class:`FedalignError` without Optuna.
    """
    optuna = check_search(axes, number)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=0, constant_liar=True)
    study = optuna.create_study(direction="maximize" if maximise else "minimize", sampler=sampler)
    asked = 0
    while asked < number:
        trials = [study.ask() for _ in range(min(BATCH, number - asked))]
        values = evaluate([{axis.key: _proposed(trial, axis) for axis in axes} for trial in trials])
        for trial, value in zip(trials, values, strict=True):
            if value is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, value)
        asked += len(trials)


def _proposed(trial: Any, axis: Choice | Range) -> Any:
    if isinstance(axis, Choice):
        return axis.values[trial.suggest_categorical(axis.key, list(range(len(axis.values))))]
    if axis.whole:
        return trial.suggest_int(axis.key, int(axis.low), int(axis.high), log=axis.log)
    # Six digits are enough for any setting, and can be read.
    return float(f"{trial.suggest_float(axis.key, axis.low, axis.high, log=axis.log):.6g}")
