"""Draws the figures in the form of the paper: a panel for each experiment, with means over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedalign.paper.figures import Figure as PaperFigure
from fedalign.protocol.plan import warmup_rounds
from fedalign.report.plot_style import colour, legend_above, line, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABELS = {"test_accuracy": "test accuracy (%)", "train_loss": "training loss"}


def draw(figure: PaperFigure, results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw a figure from compact summaries; experiments that ``results`` lacks are left out."""
    if figure.number == 3:
        return _incentive(figure, results)
    there = [name for name in figure.experiments if name in results]
    drawn, axes = panels(len(figure.curves), len(there))
    for row, curve in enumerate(figure.curves):
        for column, name in enumerate(there):
            _panel(axes[row][column], results[name], curve, figure.arms)
            axes[row][column].set_title(f"{name} ({results[name]['data']})", fontsize=7)
            if row == len(figure.curves) - 1:
                axes[row][column].set_xlabel("communication round")
            if column == 0:
                axes[row][column].set_ylabel(_LABELS[curve])
    legend_above(drawn, axes[0][0], 6)
    return drawn


def _panel(axes: Any, results: Mapping[str, Any], curve: str, arms: Sequence[str]) -> None:
    scale = 100.0 if curve == "test_accuracy" else 1.0
    seen: list[float] = []
    for index, arm in enumerate(arms):
        if arm not in results["arms"]:
            continue
        values = results["arms"][arm]["curves"][curve]
        mean = np.array(values["mean"], float) * scale
        rounds = np.arange(1, len(mean) + 1)
        wide = arm == "priority"  # FedALIGN equals `priority` if it admits nobody; the wider line stays visible
        axes.plot(rounds, mean, label=arm, linewidth=2.4 if wide else 1.1, zorder=2 if wide else 3, **line(arm, index))
        seen += [*mean[len(mean) // 20 :]]
    warmup = warmup_rounds(results["warmup"], results["rounds"])
    if warmup:
        axes.axvline(warmup + 0.5, color="0.4", linestyle=":", linewidth=1)
    low, high = np.nanmin(seen), np.nanmax(seen)
    pad = 0.12 * (high - low) or 1.0
    axes.set_ylim(low - pad, high + pad)
    axes.margins(x=0.01)


def _incentive(figure: PaperFigure, results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw the mean accuracy of free clients with each shared model beside that with their local models."""
    there = [name for name in figure.experiments if name in results]
    drawn, axes = panels(1, len(there))
    for column, name in enumerate(there):
        gains = results[name]["incentive"]
        own = next((gain["own"] for gain in gains.values()), None)
        bars = {"local": own, **{arm: gain["shared"] for arm, gain in gains.items()}}
        for place, (arm, height) in enumerate(bars.items()):
            if height is not None:
                axes[0][column].bar(place, 100 * height, color=colour(arm, place), width=0.7)
                axes[0][column].annotate(
                    f"{100 * height:.1f}", (place, 100 * height), ha="center", va="bottom", fontsize=6
                )
        axes[0][column].set_xticks(range(len(bars)), list(bars), rotation=30, fontsize=6)
        axes[0][column].set_title(f"{name} ({results[name]['data']})", fontsize=7)
        axes[0][column].set_ylim(0, 105)
        axes[0][column].grid(visible=False, axis="x")
    axes[0][0].set_ylabel("free clients' test accuracy (%)")
    return drawn
