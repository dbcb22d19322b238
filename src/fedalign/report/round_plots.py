"""Pictures of numbers over communication rounds: accuracy, loss, θ and ρ, and accuracy against its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedalign.protocol.records import History, RoundRecord
from fedalign.report.figures import Shown
from fedalign.report.plot_style import colour, figure_of, panels, rounds_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Arms = Mapping[str, Mapping[int, History]]  #: histories by arm, then by seed


def curves(arms: Arms, name: str, title: str, label: str, warmup: int, *, percent: bool = False) -> Figure:
    """Plot one number of the round records, such as ``test_accuracy``, against the round.

    Each arm is a line (the mean over seeds) with a band of one standard deviation. ``warmup`` is the number of
    warm-up rounds, marked by a dotted line; ``percent`` scales fractions to percentages.
    """
    figure, axes = figure_of()
    scale = 100.0 if percent else 1.0
    seen: list[float] = []
    for index, (arm, runs) in enumerate(arms.items()):
        table = by_seed_and_round(runs, name) * scale
        if not np.isfinite(table).any():
            continue
        known = np.isfinite(table).any(axis=0)  # a skipped round may have no number in any seed
        rounds, table = np.flatnonzero(known) + 1, table[:, known]
        mean = np.nanmean(table, axis=0)
        tint = colour(arm, index)
        spread = np.nanstd(table, axis=0, ddof=1) if table.shape[0] > 1 else np.zeros_like(mean)
        settled = slice(len(mean) // 20, None)  # the steep climb of the first rounds must not flatten the rest
        seen += [*(mean - spread)[settled], *(mean + spread)[settled]]
        # Where FedALIGN admits nobody it equals `priority`: the wider line underneath stays visible.
        width = 3.4 if arm == "priority" else 1.6
        axes.plot(rounds, mean, color=tint, label=arm, linewidth=width, zorder=2 if arm == "priority" else 3)
        if table.shape[0] > 1:
            axes.fill_between(rounds, mean - spread, mean + spread, color=tint, alpha=0.13, linewidth=0)
    if warmup:
        axes.axvline(warmup + 0.5, color="0.4", linestyle=":", linewidth=1)
        axes.annotate(
            "warm-up ends", (warmup + 0.5, 0.015), xycoords=("data", "axes fraction"), xytext=(4, 0),
            textcoords="offset points", fontsize=8, color="0.35",
        )  # fmt: skip
    axes.set(title=title, ylabel=label)
    rounds_axis(axes)
    axes.margins(x=0.01)
    low, high = np.nanmin(seen), np.nanmax(seen)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - pad, high + pad)
    axes.legend(frameon=False, ncols=2)
    return figure


def costs(arms: Arms, title: str, keys: Shown) -> Figure:
    """Plot accuracy against its cost so far: models sent in one panel, samples trained on in the other.

    ``keys`` says which accuracy that is.

    Accuracies and costs are means over seeds. A run that diverged has no total cost and is left out of that mean.
    """
    figure, axes = panels(1, 2)
    spent: dict[str, Callable[[RoundRecord], int]] = {
        "models sent, up and down": lambda r: r.models_up + r.models_down,
        "samples trained on": lambda r: r.samples,
    }
    for axis, (label, cost) in zip(axes[0], spent.items(), strict=True):
        for index, (arm, runs) in enumerate(arms.items()):
            table = 100 * by_seed_and_round(runs, keys.accuracy)
            complete = [h for h in runs.values() if len(h) == table.shape[1]]
            if not np.isfinite(table).any() or not complete:
                continue
            total = np.mean([np.cumsum([cost(r) for r in h.rounds]) for h in complete], axis=0)
            if total[-1] > 0:
                axis.plot(total, np.nanmean(table, axis=0), color=colour(arm, index), label=arm, linewidth=1.5)
        axis.set_xlabel(label)
        axis.set_xscale("log")
    axes[0][0].set_ylabel(f"{keys.words} accuracy (%)")
    handles, labels = axes[0][1].get_legend_handles_labels()
    figure.suptitle(title, fontsize=11)
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)), frameon=False)
    return figure


def by_seed_and_round(runs: Mapping[int, History], name: str) -> npt.NDArray[np.float64]:
    """Return one number of the round records as an array of seeds × rounds.

    Missing values are NaN: skipped rounds, and the rounds after a run diverged. Seeds without any value are dropped.
    """
    longest = max((len(history) for history in runs.values()), default=0)
    rows: list[Sequence[float]] = []
    for history in runs.values():
        values = [getattr(r, name) for r in history.rounds]
        known = [np.nan if v is None else float(v) for v in values]
        rows.append(known + [np.nan] * (longest - len(known)))
    table = np.array(rows, float).reshape(len(rows), longest)
    kept: npt.NDArray[np.float64] = table[~np.isnan(table).all(axis=1)]
    return kept
