"""Pictures of the theory: the measured error beside its bounds, and the trade between θ_T and ρ_T."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedalign.report.plot_style import colour, legend_above, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def error_and_bound(theory: Mapping[str, Any], title: str) -> Figure | None:
    """Plot error and bound against the local steps, and ρ_T against θ_T, the trade that ε makes.

    ``theory`` is the part of ``summary.json`` with that name. Returns None if no arm has a bound.
    """
    arms = {arm: f for arm, f in theory.get("arms", {}).items() if "fails" not in f}
    if not arms:
        return None
    figure, axes = panels(1, 2, title, height=2.6)
    errors, trade = axes[0]
    for index, (arm, f) in enumerate(arms.items()):
        tint = colour(arm, index)
        steps = [t + f["constants"]["gamma"] for t in f["curves"]["T"]]
        errors.plot(steps, f["curves"]["error"], color=tint, label=arm, linewidth=1.1)
        errors.plot(steps, f["curves"]["corrected"], color=tint, linestyle="--", linewidth=0.9)
        if "exact" in f["curves"]:
            errors.plot(steps, f["curves"]["exact"], color=tint, linestyle=":", linewidth=1.8, alpha=0.6)
        trade.plot(f["theta"], f["rho"], "o", ms=4, color=tint)
        offset = (5, 4) if index % 2 else (5, -12)  # neighbours are close together where ε is small
        trade.annotate(arm, (f["theta"], f["rho"]), xytext=offset, textcoords="offset points", fontsize=7)
    errors.set(xscale="log", yscale="log", xlabel="local steps T + γ", ylabel="E[F(w_T)] − F*")
    errors.set_title("solid: measured, dotted: exact, dashed: bound", fontsize=8)
    legend_above(figure, errors, 6)
    trade.set(xlabel="θ_T (smaller with more free clients)", ylabel="ρ_T (bias)")
    trade.margins(0.15)
    return figure
