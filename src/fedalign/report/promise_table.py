"""The table that says by how much the served model may be worse than the priority clients' own."""

from __future__ import annotations

from typing import Any

TITLE = "Can the served model be worse than the priority clients' own?"
HEADINGS = ("arm", "samples", "gained", "lost", "measured %", "at most %", "strict %", "chance of δ", "alarm")
NOTE = (
    "Last round, on the priority clients' held-out samples; counts are means over seeds. Gained, lost: samples that "
    "only the served model, or only the priority-only model, classifies correctly. Measured: lost − gained, in percent "
    "of the samples. At most, strict: upper bounds on that difference for new samples, the largest over seeds. Each "
    "holds for a run in all rounds at once. The first assumes that the models were not chosen by these samples; the "
    "strict one allows for it. Chance of δ: if the served model were worse by more than δ, outcomes as good as these "
    "would have at most this probability, choices and all rounds counted. Alarm: in how many runs a test that may be "
    "looked at in every round found the served model worse by more than δ in some round."
)


def promise_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Return the cells of the table, a row for each arm that compares the served model with the priority-only one."""
    found = []
    for arm, figures in summary["arms"].items():
        promise = figures.get("promise")  # summaries of earlier versions have none
        if promise is None:
            continue
        measured = (promise["lost"] - promise["gained"]) / promise["samples"] if promise["samples"] else 0.0
        runs = sum(value is not None for value in promise["worse_by"]["per_seed"])
        found.append(
            [
                arm,
                *(f"{promise[name]:,.0f}" for name in ("samples", "gained", "lost")),
                f"{100 * measured:.2f}",
                _percent(promise["worse_by"]["worst"]),
                _percent(promise["strict"]["worst"]),
                f"{promise['chance']['worst']:.2g} (δ = {100 * promise['delta']:g} %)",
                f"{promise['alarms']} of {runs}",
            ]
        )
    return found


def promise_sentences(summary: dict[str, Any]) -> list[str]:
    """Say in one sentence for each arm what is promised."""
    found = []
    for arm, figures in summary["arms"].items():
        promise = figures.get("promise")
        if promise is None:
            continue
        worst, strict = promise["worse_by"]["worst"], promise["strict"]["worst"]
        sentence = (
            f"{arm}: with probability {100 * (1 - promise['alpha']):g} %, the model served after the last round is "
            f"{_less(worst)} accurate than FedAvg on the priority clients"
        )
        if strict > worst:
            sentence += f"; {_less(strict)} accurate if the same samples also chose the model"
        found.append(f"{sentence}.")
    return found


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _less(bound: float) -> str:
    return f"at most {100 * bound:.1f} points less" if bound > 0 else "no less"
