"""The table that compares the theory's bounds with the measured errors, from a run's summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

HEADINGS = ("arm", "ε", "θ_T", "ρ_T", "bound", "measured\nerror", "exact", "ratio", "printed")
NOTE = (
    "Values after the last round. Bound: Theorem 1, or Theorem 2 under partial participation, corrected as in "
    "docs/theory.md. Printed: the bound as the paper prints it. Measured error: the mean of F(w_T) − F* over seeds. "
    "Exact: the expected error of least squares for the inclusions that happened, if all seeds agree on them. "
    "Ratio: the bound divided by the measured error."
)


def theory_rows(theory: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of the table, a row for each arm; an arm without a bound has dashes.

    ``theory`` is the part of ``summary.json`` with that name.
    """
    found = []
    for arm, figures in theory.get("arms", {}).items():
        if "fails" in figures:
            found.append([arm, *["–"] * (len(HEADINGS) - 1)])
            continue
        names = ("theta", "rho", "corrected", "error", "exact", "ratio", "printed")
        found.append([arm, _epsilon(*figures["epsilon"]), *(_number(figures.get(name)) for name in names)])
    return found


def theory_note(theory: Mapping[str, Any]) -> str:
    """Explain the columns of the table, and why an arm has no bound."""
    reasons = [f"{arm}: no bound, {f['fails']}." for arm, f in theory.get("arms", {}).items() if "fails" in f]
    return " ".join([NOTE, *reasons])


def theory_table(theory: Mapping[str, Any]) -> Table | str:
    """Draw the table for a terminal, or name the assumption that fails for all arms."""
    if "fails" in theory:
        return f"No bound: {theory['fails']}."
    # Narrow, so that no number is cut off at 80 columns.
    drawn = Table(caption=theory_note(theory), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, heading in enumerate(HEADINGS):
        drawn.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in theory_rows(theory):
        drawn.add_row(*row)
    return drawn


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:.3g}"


def _epsilon(first: float | str, last: float | str) -> str:
    ends = ["∞" if end == "inf" else f"{end:.2g}" for end in (first, last)]
    return ends[0] if ends[0] == ends[1] else " → ".join(ends)
