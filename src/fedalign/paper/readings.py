"""The section of ``results.md`` on what the paper leaves open: the same claims, judged for other readings of its text.

It is written from the files in the folder ``readings`` of the summaries, which ``benchmarks/readings.py`` leaves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.paper.figures import FIGURES, Claim
from fedalign.paper.verdicts import judge, rounds_to_priority
from fedalign.report.table import spread

FOLDER = "readings"  #: where the files are, below the summaries


@dataclass(frozen=True)
class Reading:
    """A reading of the paper: what it is about, its settings, and the experiments that it concerns (empty: all)."""

    title: str
    why: str
    settings: Mapping[str, Any]
    experiments: tuple[str, ...] = ()
    note: str = ""  #: what else is known

    def fits(self, experiment: str) -> bool:
        """Tell whether the reading concerns an experiment."""
        return not self.experiments or experiment in self.experiments


READINGS: dict[str, Reading] = {
    "accuracy": Reading(
        "Matching on accuracy",
        "The paper's practice section speaks of accuracies, its algorithm of losses. All else is as in the figures, "
        "and arms that a command lacks are those of the figures.",
        {},
    ),
    "five-steps": Reading(
        "Five local steps in place of five epochs",
        "The paper's theory counts local steps, and its experiments have `E = 5`.",
        {"local.epochs": False, "local.steps": 5},
        note="`epochs = false` takes back the `epochs = 5` of the experiment's file.",
    ),
    "full-batches": Reading(
        "Full batches",
        "The paper gives no batch size. Here an epoch is one step on all of a client's training data.",
        {"local.batch_size": "full"},
    ),
    "24-shards": Reading(
        "EMNIST with 24 shards a client",
        "60 clients with 24 shards need 1,440, and there are 600. So a shard may go to several clients.",
        {"data.shards": 24, "data.replacement": True},
        ("emnist",),
        "A first look with 200 rounds and 5 seeds on one H200, of which only means were kept: `priority` 78.7, `all` "
        "81.1, matching on held-out losses admits nobody, matching on held-out accuracies 81.2. By these means no "
        "claim of Figure 1 holds: `all` is above `priority`, and matching on accuracies is not a point above `all`.",
    ),
}

#: The arms that are compared, with the settings of those that experiments lack.
ARMS: dict[str, Mapping[str, Any]] = {
    "priority": {},
    "all": {},
    "fedalign": {},
    "fedalign-train": {"rule": "fedalign", "match_on": "train"},
    "fedalign-accuracy": {"rule": "fedalign", "match": "accuracy"},
    "fedalign-accuracy-train": {"rule": "fedalign", "match": "accuracy", "match_on": "train"},
}


_HOW = """The paper leaves open what its algorithm measures and how clients train. Here its claims are judged again for
other readings of its text, by the same rules. A column of verdicts is an arm of FedALIGN: it matches on losses or on
accuracies, which are measured on held-out data or on training data. ε stays as it is. Experiments that a reading lacks
were not measured: with images other than Fashion-MNIST they need a GPU. Their commands are those below with another
name.
"""
_VERDICTS = {
    "fedalign": "losses",
    "fedalign-train": "losses, training",
    "fedalign-accuracy": "accuracies",
    "fedalign-accuracy-train": "accuracies, training",
}


def read_readings(source: Path) -> list[dict[str, Any]]:
    """Read the files of a folder of summaries; an empty list if there are none.

    Raises :class:`FedalignError` for a file that is no such summary.
    """
    found = []
    for path in sorted((source / FOLDER).glob("*.json")):
        try:
            one = json.loads(path.read_text(encoding="utf-8"))
            if one["reading"] not in READINGS:
                raise ValueError(f"there is no reading {one['reading']!r}")
            found.append({**one, "arms": dict(one["arms"])})
        except (ValueError, KeyError, TypeError) as error:
            raise FedalignError(f"{path} is not a summary of a reading: {error}") from error
    return found


def readings_section(found: Sequence[Mapping[str, Any]], figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the section; ``figures`` are the results of the experiments as they are, by name.

    A reading that changes no setting has their arms beside its own.
    """
    runs = [_with_figures(one, figures.get(one["experiment"])) for one in found]
    lines = ["## What the paper leaves open\n", _HOW, *_in_short(runs, figures)]
    for name, reading in READINGS.items():
        lines += [f"### {reading.title}\n", reading.why, *([reading.note] if reading.note else []), ""]
        lines += _claims(own := [run for run in runs if run["reading"] == name])
        for run in own:
            lines += _arms(run)
    return "\n".join(lines)


def _with_figures(run: Mapping[str, Any], figures: Mapping[str, Any] | None) -> dict[str, Any]:
    same = figures is not None and all(figures[key] == run[key] for key in ("seeds", "rounds", "data"))
    if READINGS[run["reading"]].settings or figures is None or not same:
        return dict(run)
    kept = {arm: one for arm, one in figures["arms"].items() if arm in ARMS}
    return {**run, "arms": {arm: {**kept, **run["arms"]}[arm] for arm in ARMS if arm in {**kept, **run["arms"]}}}


def _judged(run: Mapping[str, Any]) -> list[tuple[int, Claim, dict[str, str]]]:
    """Judge all claims about an experiment, by arm; of the claim about `all` there is one verdict."""
    found = []
    for figure in FIGURES.values():
        for claim in figure.claims:
            if run["experiment"] not in claim.experiments or claim.comparison == "better off":
                continue
            arms = ["all"] if claim.comparison == "all below" else [arm for arm in _VERDICTS if arm in run["arms"]]
            found.append((figure.number, claim, {arm: judge(claim.comparison, run, arm).verdict for arm in arms}))
    return found


def _in_short(runs: Sequence[Mapping[str, Any]], figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List the claims that hold in some reading, with the readings in which they do."""
    base = [figures[name] for name in dict.fromkeys(run["experiment"] for run in runs) if name in figures]
    found: dict[tuple[int, str, str], dict[str, bool]] = {}  # of every claim: whether it holds, by reading and arm
    for run in [*base, *runs]:
        changed = "reading" in run and READINGS[run["reading"]].settings
        words = READINGS[run["reading"]].title if changed else "As in the figures"
        words = f"{words} (one seed)" if len(run["seeds"]) == 1 else words
        for number, claim, verdicts in _judged(run):
            of_claim = found.setdefault((number, claim.text, run["experiment"]), {})
            for arm, verdict in verdicts.items():
                of_claim[words if arm == "all" else f"{words}: `{arm}`"] = verdict == "reproduced"
    lines = ["| figure | claim | reproduced with | verdicts |", "|---|---|---|---|"]
    for (number, text, name), of_claim in found.items():
        held = [words for words, holds in of_claim.items() if holds]
        which = "all" if len(held) == len(of_claim) else "; ".join(held) or "none"
        lines.append(f"| {number} | {text}: `{name}` | {which} | {len(held)} of {len(of_claim)} |")
    return ["**Which claims depend on the reading?** Verdicts are counted by readings and arms.\n", *lines, ""]


def _claims(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    if not runs:
        return ["Not measured yet.\n"]
    lines = [
        f"| figure | claim | {' | '.join(_VERDICTS.values())} |",
        f"|---|---|{'---|' * len(_VERDICTS)}",
    ]
    for run in runs:
        for number, claim, verdicts in _judged(run):
            every = {arm: verdicts.get("all", verdicts.get(arm, "not measured")) for arm in _VERDICTS}
            lines.append(f"| {number} | {claim.text}: `{run['experiment']}` | {' | '.join(every.values())} |")
    return [*lines, ""]


def _arms(run: Mapping[str, Any]) -> list[str]:
    seeds = len(run["seeds"])
    lines = [
        f"**`{run['experiment']}`**, {run['data']}: {run['rounds']} rounds, {seeds} seed{'s' if seeds > 1 else ''}, "
        f"{run['device']}. Command: `{run['command']}`\n",
        "| arm | final accuracy | by seed | admitted a round | rounds to `priority` |",
        "|---|---|---|---|---|",
    ]
    for arm, figures in run["arms"].items():
        by_seed = ", ".join("–" if v is None else f"{100 * v:.1f}" for v in figures["test_accuracy"]["per_seed"])
        lines.append(
            f"| `{arm}` | {spread(figures['test_accuracy'], 100, 1)} | {by_seed} | {figures['admitted_mean']:.1f} "
            f"| {rounds_to_priority(figures, seeds)} |"
        )
    return [*lines, ""]
