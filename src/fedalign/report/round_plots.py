"""Pictures of numbers over communication rounds: accuracy, loss, θ and ρ, and accuracy against its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedalign.protocol.records import History, RoundRecord
from fedalign.report.measures import Measure
from fedalign.report.plot_style import figure_of, legend_above, line, panels, rounds_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Arms = Mapping[str, Mapping[int, History]]  #: histories by arm, then by seed


def curves(arms: Arms, name: str, title: str, label: str, warmup: int, *, percent: bool = False) -> Figure:
    """Plot one number of the round records, such as ``test_accuracy``, against the round.

    Each arm is a line, the mean over seeds. ``warmup`` is the number of warm-up rounds, marked by a dotted line;
    ``percent`` scales fractions to percentages.
    """
    figure, axes = figure_of(title)
    seen: list[float] = []
    for index, (arm, runs) in enumerate(arms.items()):
        rounds, table = _known(runs, name, percent)
        if not len(rounds):
            continue
        mean = np.nanmean(table, axis=0)
        seen += [*mean[len(mean) // 20 :]]  # the steep climb of the first rounds must not flatten the rest
        # Where FedALIGN admits nobody it equals `priority`: the wider line underneath stays visible.
        width = 2.4 if arm == "priority" else 1.1
        axes.plot(rounds, mean, label=arm, linewidth=width, zorder=2 if arm == "priority" else 3, **line(arm, index))
    _finish(axes, warmup, label, seen)
    legend_above(figure, axes)
    return figure


def spreads(arms: Arms, name: str, title: str, label: str, warmup: int, *, percent: bool = False) -> Figure | None:
    """Plot the spread of a number over seeds: a panel for each arm, with the median and thin lines at the quartiles.

    The means of the other arms are pale. Returns None if no arm has several seeds.
    """
    known = {arm: _known(runs, name, percent) for arm, runs in arms.items()}
    known = {arm: (rounds, table) for arm, (rounds, table) in known.items() if len(rounds)}
    if max((len(table) for _, table in known.values()), default=0) < 2:
        return None
    columns = min(3, len(known))
    rows = -(-len(known) // columns)
    figure, axes = panels(rows, columns, title, height=1.55, sharex=True, sharey=True)
    cells = [cell for row in axes for cell in row]
    window = max(1, max(len(rounds) for rounds, _ in known.values()) // 40)  # single rounds would hide the rest
    seen: list[float] = []
    for index, (arm, (rounds, table)) in enumerate(known.items()):
        cell, tint = cells[index], line(arm, list(arms).index(arm))["color"]
        for other, (x, values) in known.items():
            if other != arm:
                pale = _moving_mean(np.nanmean(values, axis=0)[None], window)[0]
                cell.plot(x, pale, color="0.8", linewidth=0.6, zorder=1)
        low, middle, high = _moving_mean(np.nanquantile(table, (0.25, 0.5, 0.75), axis=0), window)
        cell.plot(rounds, middle, zorder=3, color=tint, linewidth=1.3)
        for quartile in (low, high):
            cell.plot(rounds, quartile, zorder=2, color=tint, linewidth=0.6)
            seen += [*quartile[len(quartile) // 20 :]]
        cell.set_title(arm, fontsize=8, loc="left")
    for cell in cells[len(known) :]:
        cell.set_visible(False)
    for number, cell in enumerate(cells[: len(known)]):
        _finish(cell, warmup, label if number % columns == 0 else "", seen)
        cell.set_xlabel("")
        cell.tick_params(labelbottom=number + columns >= len(known))
    smoothed = f", lines are means of {window} rounds" if window > 1 else ""
    figure.supxlabel(f"communication round{smoothed}", fontsize=8)
    return figure


def costs(arms: Arms, measure: Measure, title: str) -> Figure:
    """Plot an accuracy against its cost so far: models sent in one panel, samples trained on in the other.

    Accuracies and costs are means over seeds. A run that diverged or stopped
    early has no total cost and is left out of that mean.
    """
    figure, axes = panels(1, 2, title)
    spent: dict[str, Callable[[RoundRecord], int]] = {
        "models sent, up and down": lambda r: r.models_up + r.models_down,
        "samples trained on": lambda r: r.samples,
    }
    for axis, (label, cost) in zip(axes[0], spent.items(), strict=True):
        for index, (arm, runs) in enumerate(arms.items()):
            table = 100 * by_seed_and_round(runs, measure.key)
            complete = [h for h in runs.values() if len(h) == table.shape[1]]
            if not np.isfinite(table).any() or not complete:
                continue
            total = np.mean([np.cumsum([cost(r) for r in h.rounds]) for h in complete], axis=0)
            if total[-1] > 0:
                axis.plot(total, np.nanmean(table, axis=0), label=arm, **line(arm, index))
        axis.set_xlabel(label)
        axis.set_xscale("log")
    axes[0][0].set_ylabel(f"{measure.words} (%)")
    legend_above(figure, axes[0][1], 6)
    return figure


def _known(
    runs: Mapping[int, History], name: str, percent: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the rounds that have a number in some seed, counted from 1, and the numbers as seeds × rounds."""
    table = by_seed_and_round(runs, name) * (100.0 if percent else 1.0)
    known = np.isfinite(table).any(axis=0)  # a skipped round may have no number in any seed
    return np.flatnonzero(known) + 1, table[:, known]


def _moving_mean(table: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    """Average each row over a window of columns around each one; at the ends the window is shorter."""
    reach, last = window // 2, table.shape[1]
    means = [table[:, max(0, i - reach) : min(last, i + reach + 1)].mean(axis=1) for i in range(last)]
    return np.stack(means, axis=1)


def _finish(axes: Axes, warmup: int, label: str, seen: Sequence[float]) -> None:
    if warmup:
        axes.axvline(warmup + 0.5, color="0.4", linestyle=":", linewidth=0.8)
    axes.set_ylabel(label)
    rounds_axis(axes)
    axes.margins(x=0.01)
    low, high = np.nanmin(seen), np.nanmax(seen)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - pad, high + pad)


def by_seed_and_round(runs: Mapping[int, History], name: str) -> npt.NDArray[np.float64]:
    """Return one number of the round records as an array of seeds × rounds.

    Missing values are NaN: skipped rounds, and the rounds after a run diverged or stopped early. Seeds without any
    value are dropped.
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
