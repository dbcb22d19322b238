"""What a red team found: gains over ``priority`` by rule, attack and fraction, and the worst case over attacks."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedalign.attacks.catalogue import NO_ATTACK
from fedalign.experiments.redteam import BASELINE, Case, RedTeam
from fedalign.experiments.redteam_runs import Figures


@dataclass(frozen=True)
class Row:
    """A rule under one attack, at one fraction of hostile clients.

    ``gain`` is the mean over seeds of the test accuracy above ``priority``, in points, ``worst_seed`` that of the worst
    seed. ``accuracy`` is in percent, ``success`` of a backdoor too (None without one). ``diverged`` counts seeds.
    """

    rule: str
    attack: str
    fraction: float
    gain: float
    worst_seed: float
    accuracy: float
    success: float | None
    seeds: int
    diverged: int


@dataclass(frozen=True)
class Worst:
    """The worst case over attacks: the lowest mean gain and its attack, and the lowest gain of any seed and its."""

    rule: str
    fraction: float
    gain: float
    attack: str
    worst_seed: float
    worst_seed_attack: str


def table_of(team: RedTeam, done: Mapping[Case, Figures]) -> list[Row]:
    """Compare every run with ``priority`` of the same seed and the same last rounds, and average over seeds."""
    rows = []
    for rule, attack, fraction in dict.fromkeys((c.rule, c.attack, c.fraction) for c in team.cases()):
        window = team.window(attack)
        gains, accuracies, successes, diverged = [], [], [], 0
        for seed in team.experiment.seeds:
            figures = done[Case(attack, fraction, seed, rule)]
            accuracies.append(100 * figures.accuracy(window))
            gains.append(accuracies[-1] - 100 * done[Case(NO_ATTACK, 0.0, seed, BASELINE)].accuracy(window))
            success = figures.success(window)
            successes += [] if success is None else [100 * success]
            diverged += figures.diverged is not None
        rows.append(
            Row(
                rule, attack, fraction, _mean(gains), min(gains), _mean(accuracies),
                _mean(successes) if successes else None, len(gains), diverged,
            )
        )  # fmt: skip
    return rows


def worst_cases(rows: Sequence[Row]) -> list[Worst]:
    """Return the worst case over attacks for every rule and fraction, with fraction 0 for no attack."""
    found = []
    rules = dict.fromkeys(row.rule for row in rows if row.rule != BASELINE)
    fractions = sorted({row.fraction for row in rows})
    for rule, fraction in itertools.product(rules, fractions):
        own = [row for row in rows if (row.rule, row.fraction) == (rule, fraction)]
        mean, seed = min(own, key=lambda row: row.gain), min(own, key=lambda row: row.worst_seed)
        found.append(Worst(rule, fraction, mean.gain, mean.attack, seed.worst_seed, seed.attack))
    return found


def as_json(team: RedTeam, rows: Sequence[Row]) -> dict[str, Any]:
    """Return what ``redteam.json`` holds."""
    experiment = team.experiment
    return {
        "experiment": experiment.name,
        "rounds": experiment.rounds,
        "seeds": experiment.seeds,
        "baseline": BASELINE,
        "attacks": team.attacks,
        "results": [asdict(row) for row in rows],
        "worst": [asdict(row) for row in worst_cases(rows)],
    }


def as_csv(rows: Sequence[Row]) -> str:
    """Return what ``redteam.csv`` holds."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Row.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(row).items()}
        )
    return text.getvalue()


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
