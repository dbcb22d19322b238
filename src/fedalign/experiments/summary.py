"""``summary.json``: the final figures of every arm, mean and standard deviation over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from fedalign.protocol.records import History, mean_or_none


def summarise(
    histories: Mapping[str, Mapping[int, History]],
    diverged: Mapping[str, Mapping[int, str]],
    alone: Set[str],
    stopped: Mapping[str, Mapping[int, str]] | None = None,
) -> dict[str, Any]:
    """Summarise every arm. A final figure is the mean of the last 10 rounds; a diverged seed has none.

    ``heldout_*`` is given where there is no test data. ``std`` is the sample standard deviation over seeds, None if
    there are fewer than two. ``admitted_mean`` is the mean number of admitted free clients over all rounds and seeds.
    ``models_up``, ``models_down`` and ``samples`` (trained on, passes included) are a run's totals, averaged over
    seeds. ``alone`` marks arms without a shared model. ``attack_success`` is given where hostile clients plant a
    backdoor. ``promise`` is about the last round, and None for arms that do not compare the served model with the
    priority-only model. ``stopped`` says why and when seeds stopped early. ``metrics`` has the figures of the users'
    metrics for priority and free clients, where there are some.
    """
    arms = {}
    for arm, runs in histories.items():
        failed = diverged.get(arm, {})
        alive = {seed: history for seed, history in runs.items() if seed not in failed}
        arms[arm] = {
            "test_accuracy": _over_seeds(runs, alive, "test_accuracy"),
            "test_loss": _over_seeds(runs, alive, "test_loss"),
            "heldout_accuracy": _over_seeds(runs, alive, "heldout_accuracy"),
            "heldout_loss": _over_seeds(runs, alive, "heldout_loss"),
            "train_loss": _over_seeds(runs, alive, "train_loss"),
            "admitted_mean": mean_or_none(float(r.admitted) for h in alive.values() for r in h.rounds),
            "models_up": mean_or_none(float(sum(r.models_up for r in h.rounds)) for h in alive.values()),
            "models_down": mean_or_none(float(sum(r.models_down for r in h.rounds)) for h in alive.values()),
            "samples": mean_or_none(float(sum(r.samples for r in h.rounds)) for h in alive.values()),
            "skipped_rounds": sum(r.skipped is not None for h in alive.values() for r in h.rounds),
            "promise": _promise(runs, alive),
            "alone": arm in alone,
            "diverged": {str(seed): message for seed, message in failed.items()},
            "stopped": {str(seed): message for seed, message in (stopped or {}).get(arm, {}).items()},
        }
        if any(r.attack_success is not None for h in runs.values() for r in h.rounds):
            arms[arm]["attack_success"] = _over_seeds(runs, alive, "attack_success")
        if names := dict.fromkeys(name for h in runs.values() for r in h.rounds for name in r.metrics):
            arms[arm]["metrics"] = {name: _metric(name, runs, alive) for name in names}
    return arms


def incentive(tests: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]], alone: str) -> dict[str, Any]:
    """Compare, for every free client, each arm's shared model with the client's own (arm ``alone``) on its test data.

    Gives for each arm, as means over seeds: ``shared`` and ``own``, the free clients' mean accuracies; ``better_off``,
    how many free clients the shared model serves better; ``free``, how many there are. Empty without accuracies.
    """
    found: dict[str, Any] = {}
    for arm, seeds in tests.items():
        if arm == alone:
            continue
        rows = []
        for seed, clients in seeds.items():
            own = {c["id"]: c["test_accuracy"] for c in tests.get(alone, {}).get(seed, [])}
            pairs = [
                (c["test_accuracy"], own[c["id"]])
                for c in clients
                if not c["priority"] and c["test_accuracy"] is not None and own.get(c["id"]) is not None
            ]
            if pairs:
                better = sum(shared > mine for shared, mine in pairs)
                rows.append((*[sum(side) / len(pairs) for side in zip(*pairs, strict=True)], better, len(pairs)))
        if rows:
            shared, mine, better, free = (sum(column) / len(rows) for column in zip(*rows, strict=True))
            found[arm] = {"shared": shared, "own": mine, "better_off": better, "free": free}
    return found


def over_seeds(per_seed: Sequence[float | None]) -> dict[str, Any]:
    """Average figures over seeds; those that are missing or not finite are left out.

    >>> over_seeds([0.5, 0.7, None])["mean"], over_seeds([0.5])["std"]
    (0.6, None)
    """
    there = [value for value in per_seed if value is not None and math.isfinite(value)]
    if not there:
        return {"mean": None, "std": None, "per_seed": per_seed}
    mean = sum(there) / len(there)
    spread = math.sqrt(sum((v - mean) ** 2 for v in there) / (len(there) - 1)) if len(there) > 1 else None
    return {"mean": mean, "std": spread, "per_seed": per_seed}


def _over_seeds(runs: Mapping[int, History], alive: Mapping[int, History], name: str) -> dict[str, Any]:
    return over_seeds([alive[seed].final(name) if seed in alive else None for seed in runs])


def _metric(name: str, runs: Mapping[int, History], alive: Mapping[int, History]) -> dict[str, Any]:
    """Summarise a metric; a round without it, as one whose outputs are not finite, does not count."""
    having = {seed: History([r for r in history.rounds if name in r.metrics]) for seed, history in alive.items()}
    parts = ("priority", "free", "priority_pooled", "free_pooled")
    return {part: _over_seeds(runs, having, f"{name}.{part}") for part in parts}


def _promise(runs: Mapping[int, History], alive: Mapping[int, History]) -> dict[str, Any] | None:
    """Return the bounds of the last round that has some, by seed: the ``worst`` one is the largest."""
    last = [
        next((r.promise for r in reversed(alive[seed].rounds) if r.promise is not None), None)
        if seed in alive
        else None
        for seed in runs
    ]
    known = [promise for promise in last if promise is not None]
    if not known:
        return None

    def over_seeds(name: str) -> dict[str, Any]:
        values = [None if promise is None else getattr(promise, name) for promise in last]
        return {"worst": max(value for value in values if value is not None), "per_seed": values}

    return {
        "worse_by": over_seeds("worse_by"),
        "strict": over_seeds("strict"),
        "chance": over_seeds("chance"),
        **{name: mean_or_none(float(getattr(p, name)) for p in known) for name in ("gained", "lost", "samples")},
        "alpha": known[0].alpha,
        "delta": known[0].delta,
        "alarms": sum(promise.alarm for promise in known),
    }
