"""Judges whether a claim holds in our runs: arms are compared seed by seed, with a margin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedalign.paper.figures import Comparison
from fedalign.report.table import spread

MARGIN = 0.01  #: one point of accuracy: smaller mean differences do not count


@dataclass(frozen=True)
class Verdict:
    """The numbers that were measured, and whether the claim holds, as text."""

    measured: str
    verdict: str


def judge(comparison: Comparison, results: Mapping[str, Any], arm: str = "fedalign") -> Verdict:
    """Judge a claim on the compact summary of one experiment; ``arm`` is the FedALIGN arm that the claim is about."""
    arms = results["arms"]
    if comparison == "all below":
        text = f"`all` {_final(arms['all'])}, `priority` {_final(arms['priority'])}"
        return Verdict(text, _verdict([("priority", arms["priority"], "all", arms["all"])]))
    if comparison == "faster":
        return _faster(arms, arm)
    if comparison == "better off":
        return _incentive(results["incentive"].get(arm))
    seeds = len(results["seeds"])
    reached = ", ".join(f"`{a}` {rounds_to_priority(arms[a], seeds)}" for a in (arm, "priority"))
    text = (
        f"`{arm}` {_final(arms[arm])}, `priority` {_final(arms['priority'])}, `all` {_final(arms['all'])}; "
        f"rounds to `priority`: {reached}"
    )
    return Verdict(text, _verdict([(arm, arms[arm], baseline, arms[baseline]) for baseline in ("priority", "all")]))


def rounds_to_priority(figures: Mapping[str, Any], seeds: int) -> str:
    """Return as text how many rounds an arm needs to reach the final accuracy of `priority`, and in how many seeds."""
    reached = [r for r in figures["rounds_to_priority"] if r is not None]
    return f"{sum(reached) / len(reached):.0f} ({len(reached)}/{seeds})" if reached else f"never (0/{seeds})"


def _faster(arms: Mapping[str, Any], arm: str) -> Verdict:
    """Compare the rounds until the final accuracy of `priority` is reached, seed by seed."""
    pairs = list(zip(arms[arm]["rounds_to_priority"], arms["priority"]["rounds_to_priority"], strict=True))
    wins = sum(a is not None and (b is None or a < b) for a, b in pairs)
    text = ", ".join(f"`{a}` {rounds_to_priority(arms[a], len(pairs))}" for a in (arm, "priority"))
    where = f"sooner in {wins} of {len(pairs)} seeds"
    if wins >= 0.8 * len(pairs):
        return Verdict(f"rounds to `priority`: {text}", "reproduced")
    verdict = "depends on the seed" if wins >= 0.5 * len(pairs) else "not reproduced"
    return Verdict(f"rounds to `priority`: {text}", f"{verdict}: {where}")


def _incentive(gain: Mapping[str, Any] | None) -> Verdict:
    if gain is None:
        return Verdict("no `local` arm in this run", "not measured")
    text = (
        f"on free clients' own test data: shared model {100 * gain['shared']:.1f} %, own {100 * gain['own']:.1f} %; "
        f"{gain['better_off']:.1f} of {gain['free']:.0f} better off"
    )
    good = gain["shared"] - gain["own"] >= MARGIN and gain["better_off"] > gain["free"] / 2
    return Verdict(text, "reproduced" if good else "not reproduced")


def _final(figures: Mapping[str, Any]) -> str:
    return spread(figures["test_accuracy"], 100, 1)


def _verdict(pairs: Sequence[tuple[str, Mapping[str, Any], str, Mapping[str, Any]]]) -> str:
    """Say whether the first of each pair is above the second, by a point in the mean and in four of five seeds."""
    below, unsure = [], []
    for _, better, name, worse in pairs:
        both = zip(better["test_accuracy"]["per_seed"], worse["test_accuracy"]["per_seed"], strict=True)
        differences = [a - b for a, b in both if a is not None and b is not None]
        if not differences:
            return "not measured"
        wins = sum(d > 0 for d in differences)
        mean = sum(differences) / len(differences)
        if mean < MARGIN:
            below.append(f"{'less than a point' if mean > 0 else 'not'} above `{name}`")
        elif wins < 0.8 * len(differences):
            unsure.append(f"above `{name}` in {wins} of {len(differences)} seeds")
    if below:
        return f"not reproduced: {', '.join(below)}"
    return f"depends on the seed: {', '.join(unsure)}" if unsure else "reproduced"
