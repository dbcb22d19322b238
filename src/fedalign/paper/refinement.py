"""The section of ``results.md`` that judges Figure 3 again, for clients that refine the served model.

It is written from the files in the folder ``personal`` of the summaries, which ``benchmarks/personal.py`` leaves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError

FOLDER = "personal"  #: where the files are, below the summaries
_POINTS = 1.0  # a gain below a point is none, as for the other claims
_HOW = """The paper says that the shared model also "aids in refining local models". Here every client goes on from the
final model, on its own data, with early stopping on its held-out part. Only free clients are counted.

- **alone** is the arm `local`: as many epochs as the rounds have. **scratch** trains alone with early stopping. It is
  the fairer rival, because it stops as carefully as a client that refines.
- **Better off** and **worse off** are shares of the free clients, of all seeds together. The others have equal
  accuracies. Gains are means in points of test accuracy.
- **Verdict.** The claim "holds" for an arm if `refine` gains at least a point on average over both rivals. This rule
  was set after the runs, so both gains stand beside it.
"""


def read_refinement(source: Path) -> list[dict[str, Any]]:
    """Read the files of a folder of summaries; an empty list if there are none.

    Raises :class:`FedalignError` for a file that is no such summary.
    """
    found = []
    for path in sorted((source / FOLDER).glob("*.json")):
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            found.append({**results, "rows": [dict(row) for row in results["rows"]]})
        except (ValueError, KeyError, TypeError) as error:
            raise FedalignError(f"{path} is not a summary of personal models: {error}") from error
    return found


def refinement_section(runs: Sequence[Mapping[str, Any]]) -> str:
    """Write the section: what was found in short, and a table for each experiment."""
    lines = ["## Figure 3 with refinement\n", _HOW, *_in_short(runs)]
    for run in runs:
        seeds = len(run["seeds"])
        lines += [
            f"**`{run['experiment']}`**, {run['data']}: {run['clients']} free clients, {run['rounds']} rounds, {seeds} "
            f"seed{'s' if seeds > 1 else ''}, {run['device']}. Command: `{run['command']}`\n",
            "| arm | model | accuracy | alone | better off | worse off | gain over alone | by seed "
            "| better off than scratch | gain over scratch |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(_row(row) for row in run["rows"]),
            "",
        ]
    return "\n".join(lines)


def verdict(row: Mapping[str, Any]) -> str:
    """Say whether clients that refine have a reason to join.

    >>> verdict({"gain": 2.0, "gain_over_scratch": 1.5}), verdict({"gain": 2.0, "gain_over_scratch": 0.5})
    ('holds', 'does not hold')
    """
    return "holds" if min(row["gain"], row["gain_over_scratch"]) >= _POINTS else "does not hold"


def _in_short(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| experiment | arm | better off, shared | gain, shared | better off, `refine` | gain, `refine` "
        "| over scratch | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    held: dict[str, list[str]] = {}
    ran: dict[str, int] = {}
    below = cases = 0
    for run in runs:
        rows = {(row["arm"], row["model"]): row for row in run["rows"]}
        for arm in dict.fromkeys(row["arm"] for row in run["rows"]):
            shared, refined = rows[arm, "shared"], rows[arm, "refine"]
            held.setdefault(arm, [])
            ran[arm] = ran.get(arm, 0) + 1
            cases, below = cases + 1, below + (refined["gain"] < shared["gain"])
            if verdict(refined) == "holds":
                held[arm].append(f"`{run['experiment']}`")
            lines.append(
                f"| `{run['experiment']}` | `{arm}` | {shared['better_off']:.0%} | {shared['gain']:+.1f} "
                f"| {refined['better_off']:.0%} | {refined['gain']:+.1f} "
                f"| {refined['gain_over_scratch']:+.2f} | **{verdict(refined)}** |"
            )
    words = [
        f"- `{arm}`: the claim holds with refinement in {len(names)} of {ran[arm]} experiments"
        + (f" ({', '.join(names)})." if names else ".")
        for arm, names in held.items()
    ]
    question = "**Does the paper's claim hold with refinement?** It depends on the arm and on the data:\n"
    harm = f"- In {below} of {cases} cases below, refined models are on average worse than the shared model."
    short = [f"`{run['experiment']}`" for run in runs if len(run["seeds"]) == 1]
    few = [f"- {', '.join(short)} ran for one seed, reduced as its command says: an indication only."] if short else []
    return [question, *words, harm, *few, "", *lines, ""]


def _row(row: Mapping[str, Any]) -> str:
    by_seed = ", ".join(f"{gain:+.1f}" for gain in row["gain_by_seed"])
    return (
        f"| `{row['arm']}` | {row['model']} | {row['accuracy']:.1f} | {row['alone']:.1f} | {row['better_off']:.0%} "
        f"| {row['worse_off']:.0%} | {row['gain']:+.1f} | {by_seed} | {row['better_off_than_scratch']:.0%} "
        f"| {row['gain_over_scratch']:+.1f} |"
    )
