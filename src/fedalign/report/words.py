"""The summary of a run in sentences: what won, by how much, whether that is more than the spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedalign.experiments.personal_summary import SHARED
from fedalign.protocol.records import mean_or_none
from fedalign.report.figures import Shown
from fedalign.report.measures import Measure, headline
from fedalign.report.read_runs import RunFolder

_MOST_NAMED = 5  # unfinished runs that are named one by one
BASELINE = "priority"  #: the arm that all others are compared with, if it is there


@dataclass(frozen=True)
class Comparison:
    """How much better one arm is than another, seed by seed: positive means better, whatever the measure."""

    mean: float
    spread: float | None
    better: int
    seeds: int

    @property
    def equal(self) -> bool:
        """Whether the arms have the same figures."""
        return self.mean == 0 and not self.spread

    @property
    def clear(self) -> bool | None:
        """Whether the difference is larger than its spread over seeds; None with a single seed."""
        return None if self.spread is None else abs(self.mean) > self.spread


def compare(one: Mapping[int, float], other: Mapping[int, float], measure: Measure) -> Comparison | None:
    """Compare two arms by the figures of the seeds that both have; None if there is no such seed.

    Arms of a seed have the same data and start, so the differences vary less than the figures themselves.

    >>> from fedalign.report.measures import TEST_LOSS
    >>> compare({0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.75}, TEST_LOSS)
    Comparison(mean=0.625, spread=0.1767766952966369, better=2, seeds=2)
    """
    sign = 1.0 if measure.higher else -1.0
    gaps = [sign * (value - other[seed]) for seed, value in one.items() if seed in other]
    if not gaps:
        return None
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)) if len(gaps) > 1 else None
    return Comparison(mean, spread, sum(gap > 0 for gap in gaps), len(gaps))


def finals(run: RunFolder, measure: Measure) -> dict[str, dict[int, float]]:
    """Return the final figure, a mean of the last 10 rounds, of every arm and seed; diverged seeds have none."""
    found: dict[str, dict[int, float]] = {}
    for arm, runs in run.histories.items():
        failed = run.summary["arms"][arm]["diverged"]
        values = {
            seed: mean_or_none(map(measure.of, history.rounds[-10:]))
            for seed, history in runs.items()
            if str(seed) not in failed
        }
        found[arm] = {seed: value for seed, value in values.items() if value is not None and math.isfinite(value)}
    return found


def summary_words(run: RunFolder) -> list[str]:
    """Summarise a run in sentences, the most important first."""
    measure = headline(run.histories)
    figures = finals(run, measure)
    arms = run.summary["arms"]
    means = {arm: sum(own.values()) / len(own) for arm, own in figures.items() if own}
    shared = {arm: mean for arm, mean in means.items() if not arms[arm]["alone"]}
    if not shared:
        return ["No round has a figure to compare yet.", *_failures(run)]
    ranked = sorted(shared, key=lambda arm: shared[arm], reverse=measure.higher)
    best = ranked[0]
    seeds = len(figures[best])
    over = f"mean of the last 10 rounds and of {seeds} seeds" if seeds > 1 else "mean of the last 10 rounds, one seed"
    if len(ranked) == 1:
        said = [f"{best}: {measure.text(shared[best])} {measure.label} for the priority clients ({over})."]
    else:
        said = [
            f"{best} has the best shared model: {measure.text(shared[best])} {measure.label} for the priority clients "
            f"({over})."
        ]
        rivals = dict.fromkeys([BASELINE, ranked[1]] if BASELINE in shared and best != BASELINE else [ranked[1]])
        for rival in rivals:
            if (found := compare(figures[best], figures[rival], measure)) is not None:
                said.append(_verdict(best, rival, measure.text(shared[rival]), found, measure))
    said += (
        _twins(figures, ranked)
        + _alone(run, means, shared[best], measure)
        + _gains(run, best)
        + _cost(run, best)
        + _failures(run)
    )
    advice = None if "theory" in run.summary else Shown(measure.split).advice  # the theory needs no test data
    return said if advice is None else [*said, advice]


def across_words(runs: Sequence[RunFolder], labels: Sequence[str]) -> list[str]:
    """Say which of several runs has the best shared model; nothing if they are not judged by the same figure."""
    measures = {headline(run.histories) for run in runs}
    if len(runs) < 2 or len(measures) > 1:
        return []
    (measure,) = measures
    found = []
    for run, label in zip(runs, labels, strict=True):
        for arm, own in finals(run, measure).items():
            if own and not run.summary["arms"][arm]["alone"]:
                found.append((sum(own.values()) / len(own), arm, label))
    if not found:
        return []
    mean, arm, label = (max if measure.higher else min)(found)
    return [
        f"Of all runs, the best shared model is that of {arm} with {label}: {measure.text(mean)} {measure.label}. "
        "Runs with other settings may have other data, so compare them with care."
    ]


def _verdict(best: str, rival: str, level: str, found: Comparison, measure: Measure) -> str:
    if found.equal:
        return f"{rival} has the same figures in every seed."
    gap = measure.difference(found.mean)
    direction = "above" if measure.higher else "below"
    if found.mean < 0:
        direction = "below" if measure.higher else "above"
    said = f"{best} is {gap} {direction} {rival} ({level})"
    if found.spread is None:
        return f"{said}. With one seed nobody can tell whether that is chance: run more with --seeds."
    said += f", and better in {found.better} of {found.seeds} seeds. Over the seeds this difference varies by ± "
    said += measure.difference(found.spread)
    if found.clear:
        return f"{said}: the lead is more than the spread over seeds."
    if found.better == found.seeds:
        return f"{said}: the lead is less than the spread over seeds, although it is there in every seed."
    return f"{said}: the lead is less than the spread over seeds, so these seeds do not settle which is better."


def _twins(figures: Mapping[str, Mapping[int, float]], ranked: Sequence[str]) -> list[str]:
    """Name the arms whose curves lie on each other, except the best one, which has been compared."""
    groups: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for arm in ranked[1:]:
        groups.setdefault(tuple(figures[arm].items()), []).append(arm)
    return [f"{' and '.join(arms)} have the same figures in every seed." for arms in groups.values() if len(arms) > 1]


def _alone(run: RunFolder, means: Mapping[str, float], best: float, measure: Measure) -> list[str]:
    """Say how clients fare that train on their own; such arms have no shared model and are not ranked."""
    said = []
    for arm, mean in means.items():
        if run.summary["arms"][arm]["alone"]:
            gap = (mean - best) if measure.higher else (best - mean)
            side = "better" if gap > 0 else "worse"
            said.append(
                f"{arm} trains a model for each client and shares none: {measure.text(mean)} on the priority clients' "
                f"own data, {measure.difference(gap)} {side} than the best shared model. It is not ranked."
            )
    return said


def _gains(run: RunFolder, best: str) -> list[str]:
    gain = run.summary.get("incentive", {}).get(best)
    if not gain:
        return []
    said = [
        f"With {best}'s model, {gain['better_off']:.1f} of {gain['free']:.0f} free clients are better off than with a "
        f"model of their own ({100 * gain['shared']:.1f} % against {100 * gain['own']:.1f} % accuracy)."
    ]
    for method, own in run.summary.get("personal", {}).get(best, {}).get("free", {}).items():
        if method != SHARED and own["better_off"] is not None:
            said.append(
                f"With what they make of it by {method}, {own['better_off']:.1f} are better off and "
                f"{own['worse_off']:.1f} are worse off ({100 * own['accuracy']:.1f} % accuracy)."
            )
    return said


def _cost(run: RunFolder, best: str) -> list[str]:
    arms = run.summary["arms"]
    if best == BASELINE or BASELINE not in arms:
        return []
    parts = [
        f"{arms[best][key] / arms[BASELINE][key]:.1f} times as many models are sent {words}"
        for key, words in (("models_down", "to clients"), ("models_up", "back"))
        if arms[best][key] and arms[BASELINE][key]
    ]
    return [f"Its cost: {' and '.join(parts)} as with {BASELINE}."] if parts else []


def _failures(run: RunFolder) -> list[str]:
    """Say which runs are unfinished, diverged or stopped early."""
    said = [f"Unfinished: {what}." for what in run.missing[:_MOST_NAMED]]
    if len(run.missing) > _MOST_NAMED:
        said.append(f"{len(run.missing) - _MOST_NAMED} more runs are unfinished.")
    for arm, figures in run.summary["arms"].items():
        for seed, message in figures["diverged"].items():
            said.append(f"{arm}, seed {seed} ended early and is left out of the figures: {message}")
        for seed, message in figures.get("stopped", {}).items():
            said.append(f"{arm}, seed {seed} stopped early: {message}")
    return said
