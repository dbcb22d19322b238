"""``results.md``: every figure of the paper from our runs, and for every claim whether it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.paper.figures import FIGURES, Claim, Figure
from fedalign.paper.pictures import draw
from fedalign.paper.readings import read_readings, readings_section
from fedalign.paper.refinement import read_refinement, refinement_section
from fedalign.paper.verdicts import judge, rounds_to_priority
from fedalign.report.plot_style import save
from fedalign.report.table import spread

_HOW = """The experiments of the paper (Ravi and Shomorony, 2023), repeated with this package. For every claim of
the paper the page says what was measured and whether the claim holds. The figures follow, in the paper's form.

Terms: *priority clients* are those whose accuracy is the goal, and the others are *free clients*. An *arm* is one
method in a comparison. ε is the largest difference in loss with which FedALIGN admits a free client.

| arm | |
|---|---|
| `priority` | FedAvg on the priority clients |
| `all` | FedAvg on all clients |
| `local` | every client by itself, a model each |
| `fedalign` | FedALIGN, which compares losses on held-out data: data that clients never train on |
| `fedalign-train` | FedALIGN, which compares losses on training data, as the paper does |

How to read the figures:

- **Final accuracy** is the test accuracy of the priority clients in %: the mean of the last 10 rounds, ± the
  standard deviation over seeds.
- **Rounds to `priority`** is the mean number of rounds until the test accuracy, averaged over five rounds, reaches
  the final accuracy of `priority` in the same seed. In brackets: in how many seeds it does.
- **Verdicts.** A claim that one arm is above another is "reproduced" if its mean is at least one point higher and
  it is higher in four of five seeds. It "depends on the seed" if the mean is higher by a point, but in fewer seeds.

Written by `fedalign paper --from {source} --page {page}` from the summaries in `{source}`, which `fedalign paper`
leaves of its runs.
"""


_WORDS = ("reproduced", "depends on the seed", "not reproduced", "not measured")


def write_page(results: Mapping[str, Mapping[str, Any]], source: Path, page: Path) -> list[Path]:
    """Write the page, and its pictures into ``img`` beside it; return the files."""
    known = [name for figure in FIGURES.values() for name in figure.experiments]
    if not any(name in results for name in known):
        raise FedalignError(f"{source} has no results of the paper's experiments ({', '.join(known)})")
    pictures = page.parent / "img"
    pictures.mkdir(parents=True, exist_ok=True)
    parts = ["# The paper's experiments, and what holds\n", _HOW.format(source=source, page=page), _claims(results)]
    files = [page]
    for figure in FIGURES.values():
        there = [name for name in figure.experiments if name in results]
        if there:
            files += save(draw(figure, results), pictures / f"figure-{figure.number}", suffixes=(".png",))
        parts.append(_figure(figure, results))
        if figure.number == 3 and (refined := read_refinement(source)):
            parts.append(refinement_section(refined))
    if readings := read_readings(source):
        parts.append(readings_section(readings, results))
    parts.append(_machines(results))
    page.write_text("\n".join(parts), encoding="utf-8")
    return files


def _claims(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        "## The claims\n",
        "| figure | claim | measured | verdict, `fedalign` | verdict, `fedalign-train` | command |",
        "|---|---|---|---|---|---|",
    ]
    for figure in FIGURES.values():
        for claim in figure.claims:
            for name in claim.experiments:
                lines.append(f"| {figure.number} | {claim.text}: {_judged(claim, name, results.get(name))} |")
    judged = [line.split("|")[4] for line in lines[3:] if "not run yet" not in line]
    counted = {word: sum(cell.strip(" *").startswith(word) for cell in judged) for word in _WORDS}
    in_short = ", ".join(f"{word} {count}" for word, count in counted.items())
    lines.insert(1, f"Verdicts for `fedalign` on {len(judged)} claims about an experiment: {in_short}.\n")
    return "\n".join([*lines, ""])


def _judged(claim: Claim, name: str, results: Mapping[str, Any] | None) -> str:
    """Return a claim's table cells for one experiment, starting with the experiment's name."""
    if results is None:
        return f"`{name}` | – | not run yet | | `fedalign run {name}`"
    held = judge(claim.comparison, results)
    train = ""
    if claim.comparison != "all below" and "fedalign-train" in results["arms"]:
        train = judge(claim.comparison, results, "fedalign-train").verdict
    return f"`{name}`, {results['data']} | {held.measured} | **{held.verdict}** | {train} | `{results['command']}`"


def _figure(figure: Figure, results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"## Figure {figure.number}: {figure.title}\n"]
    there = [name for name in figure.experiments if name in results]
    if there:
        lines.append(f"![Figure {figure.number}](img/figure-{figure.number}.png)\n")
    for name in figure.experiments:
        if name not in results:
            lines.append(f"`{name}` has not run yet. Command: `fedalign paper --figures {figure.number}`\n")
            continue
        lines += _table(name, results[name])
    return "\n".join(lines)


def _table(name: str, results: Mapping[str, Any]) -> list[str]:
    seeds = len(results["seeds"])
    description = results["description"].partition(": ")[2] or results["description"]
    lines = [
        f"**`{name}`**, {results['data']}: {description}{'' if description.endswith('?') else '.'} "
        f"{results['rounds']} rounds, {seeds} seeds. Command: `{results['command']}`\n",
        "| arm | final accuracy | by seed | admitted a round | rounds to `priority` |",
        "|---|---|---|---|---|",
    ]
    for arm, figures in results["arms"].items():
        accuracy = figures["test_accuracy"]
        final = spread(accuracy, 100, 1)
        by_seed = ", ".join("–" if v is None else f"{100 * v:.1f}" for v in accuracy["per_seed"])
        took = rounds_to_priority(figures, seeds)
        admitted = "–" if figures["alone"] else f"{figures['admitted_mean']:.1f}"
        lines.append(f"| `{arm}` | {final} | {by_seed} | {admitted} | {took} |")
    return [*lines, ""]


def _machines(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["## Where it ran\n", "| experiment | device | seconds, all arms and seeds |", "|---|---|---|"]
    lines += [f"| `{name}` | {r['device']} | {r['seconds']:.0f} |" for name, r in sorted(results.items())]
    return "\n".join([*lines, ""])
