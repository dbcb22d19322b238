"""What an unfinished run has so far, and what it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.experiments.arms import trains_alone
from fedalign.experiments.personal_summary import personal_summary
from fedalign.experiments.store import RunStore
from fedalign.experiments.summary import incentive, summarise
from fedalign.protocol.records import History

Histories = Mapping[str, Mapping[int, History]]
Stores = Mapping[str, Mapping[int, RunStore]]


def what_is_missing(stores: Stores, histories: Histories, rounds: int) -> list[str]:
    """List the runs that have not finished, each with the rounds it has.

    Runs that diverged or stopped early have finished.
    """
    return [
        f"{arm}, seed {seed}: {len(histories[arm][seed])} of {rounds} rounds"
        for arm, own in stores.items()
        for seed, store in own.items()
        if not store.model.exists() and store.diverged() is None and store.stopped() is None
    ]


def begun(folder: Path, histories: Histories) -> dict[str, dict[int, History]]:
    """Keep the runs that have finished a round; raises :class:`FedalignError` if there is none."""
    kept = {arm: {seed: one for seed, one in own.items() if len(one)} for arm, own in histories.items()}
    kept = {arm: own for arm, own in kept.items() if own}
    if not kept:
        raise FedalignError(f"{folder} holds an unfinished run without any round; continue it with --resume")
    return kept


def summary_so_far(settings: Mapping[str, Any], stores: Stores, histories: Histories) -> dict[str, Any]:
    """Summarise the rounds that there are, as ``summary.json`` does; ``unfinished`` marks it."""
    diverged = {
        arm: {seed: message for seed in own if (message := stores[arm][seed].diverged()) is not None}
        for arm, own in histories.items()
    }
    stopped = {
        arm: {seed: str(early) for seed in own if (early := stores[arm][seed].stopped()) is not None}
        for arm, own in histories.items()
    }
    alone = {arm for arm in histories if trains_alone(settings, arm)}
    tests = {arm: {seed: stores[arm][seed].clients() for seed in own} for arm, own in histories.items()}
    return {
        "experiment": settings["name"],
        "rounds": settings["rounds"],
        "seeds": sorted({seed for own in histories.values() for seed in own}),
        "device": settings["device"],
        "unfinished": True,
        "arms": summarise(histories, diverged, alone, stopped),
        **({"incentive": incentive(tests, next(iter(alone)))} if alone else {}),
        **({"personal": personal} if (personal := personal_summary(tests, next(iter(alone), None))) else {}),
    }
