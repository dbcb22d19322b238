"""The theory's table and pictures, from a run's summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedalign.report import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADINGS = ("arm", "ε", "θ_T", "ρ_T", "bound", "measured\nerror", "exact", "ratio", "printed")
NOTE = (
    "After the last round. Bound: Theorem 1 (under partial participation 2), corrected as in docs/theory.md; "
    "printed: as the paper has it. Measured: the mean of F(w_T) − F* over seeds. Exact: the expected error of least "
    "squares for the inclusions that happened, where they are the same in all seeds."
)


def rows(theory: Mapping[str, Any]) -> list[list[str]]:
    """Give the table's cells; an arm without a bound has none (:func:`note` says why)."""
    found = []
    for arm, figures in theory.get("arms", {}).items():
        if "fails" in figures:
            found.append([arm, *["–"] * (len(HEADINGS) - 1)])
            continue
        names = ("theta", "rho", "corrected", "error", "exact", "ratio", "printed")
        found.append([arm, _epsilon(*figures["epsilon"]), *(_number(figures.get(name)) for name in names)])
    return found


def note(theory: Mapping[str, Any]) -> str:
    """Explain the table, and why an arm has no bound."""
    reasons = [f"{arm}: no bound, {f['fails']}." for arm, f in theory.get("arms", {}).items() if "fails" in f]
    return " ".join([NOTE, *reasons])


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:.3g}"


def _epsilon(first: float | str, last: float | str) -> str:
    ends = ["∞" if end == "inf" else f"{end:.2g}" for end in (first, last)]
    return ends[0] if ends[0] == ends[1] else " → ".join(ends)


def table(theory: Mapping[str, Any]) -> Table | str:
    """Draw the table for the terminal; where an assumption fails, say which."""
    if "fails" in theory:
        return f"No bound: {theory['fails']}."
    drawn = Table(
        caption=note(theory), box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )  # narrow: no number may be cut at 80 columns
    for number, heading in enumerate(HEADINGS):
        drawn.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows(theory):
        drawn.add_row(*row)
    return drawn


def picture(theory: Mapping[str, Any], title: str) -> Figure | None:
    """Draw error and bound over local steps on log axes, and what ε trades: θ_T against ρ_T."""
    arms = {arm: f for arm, f in theory.get("arms", {}).items() if "fails" not in f}
    if not arms:
        return None
    figure, axes = plots.panels(1, 2)
    errors, trade = axes[0]
    for index, (arm, f) in enumerate(arms.items()):
        tint = plots.colour(arm, index)
        steps = [t + f["constants"]["gamma"] for t in f["curves"]["T"]]
        errors.plot(steps, f["curves"]["error"], color=tint, label=arm, linewidth=1.6)
        errors.plot(steps, f["curves"]["corrected"], color=tint, linestyle="--", linewidth=1.2)
        if "exact" in f["curves"]:
            errors.plot(steps, f["curves"]["exact"], color=tint, linestyle=":", linewidth=2.6, alpha=0.6)
        trade.plot(f["theta"], f["rho"], "o", color=tint)
        above = (5, 4) if index % 2 else (5, -12)  # neighbours lie close where ε is small
        trade.annotate(arm, (f["theta"], f["rho"]), xytext=above, textcoords="offset points", fontsize=9)
    errors.set(xscale="log", yscale="log", xlabel="local steps T + γ", ylabel="E[F(w_T)] − F*")
    errors.set_title("solid: measured, dotted: exact, dashed: bound", fontsize=9)
    errors.legend(frameon=False, fontsize=8, ncols=2)
    trade.set(xlabel="θ_T: less is more free clients", ylabel="ρ_T: bias")
    trade.margins(0.15)
    figure.suptitle(title)
    return figure
