"""The picture of a sweep: a line for one key, heat maps for two, parallel coordinates for more and for Optuna."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedalign.experiments.sweep_space import Choice, Range, shown
from fedalign.experiments.sweep_table import Row, best_rows
from fedalign.report import plot_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WORDS = {
    "test_accuracy": "test accuracy (%)",
    "test_loss": "test loss",
    "heldout_accuracy": "held-out accuracy (%)",
    "heldout_loss": "held-out loss",
    "global_accuracy": "accuracy of the model sent out (%)",
    "global_loss": "loss of the model sent out",
}
_SCALE = "cividis"  # readable with any colour vision


def picture(axes: Sequence[Choice | Range], rows: Sequence[Row], by: str, title: str) -> Figure:
    """Draw the points of a sweep; ``by`` is the figure to show, and the best point of each arm is marked."""
    if len(axes) == 1:
        return _line(axes[0], rows, by, title)
    if len(axes) == 2 and all(isinstance(axis, Choice) for axis in axes):
        return _heat_maps(axes, rows, by, title)
    return _parallel(axes, rows, by, title)


def words(by: str) -> str:
    """Name a figure, with its unit."""
    return _WORDS[by]


def scaled(value: float, by: str) -> float:
    """Give a figure in its unit: accuracies in percent."""
    return 100 * value if by.endswith("accuracy") else value


def _digits(by: str) -> int:
    return 1 if by.endswith("accuracy") else 3


def _line(axis: Choice | Range, rows: Sequence[Row], by: str, title: str) -> Figure:
    """Draw a line for each arm; the values of a list stand at equal distances, those of a range where they are."""
    figure, axes = plot_style.figure_of(f"{title}, {words(by)}: bars are standard deviations over seeds")
    _, by_arm = best_rows(rows, by)
    place = _places(axis, rows)
    if isinstance(axis, Choice):
        ordered = sorted(place, key=lambda text: place[text])
        place = {text: float(number) for number, text in enumerate(ordered)}
        axes.set_xticks(range(len(ordered)), ordered)
    elif axis.log:
        axes.set_xscale("log")
    for index, arm in enumerate(by_arm):
        own = [row for row in rows if row.arm == arm and row.mean(by) is not None]
        own.sort(key=lambda row: place[shown(row.point[axis.key])])
        # Beside one another, so that the bars of several arms can be told apart.
        beside = 0.06 * (index - (len(by_arm) - 1) / 2) if isinstance(axis, Choice) else 0.0
        xs = [place[shown(row.point[axis.key])] + beside for row in own]
        ys = [scaled(row.figures[by]["mean"], by) for row in own]
        spread = [scaled(row.figures[by]["std"] or 0.0, by) for row in own]
        style = plot_style.line(arm, index)
        axes.errorbar(xs, ys, yerr=spread, color=style["color"], elinewidth=0.8, linestyle="none")
        axes.plot(xs, ys, marker=plot_style.MARKERS[index % len(plot_style.MARKERS)], markersize=4, label=arm, **style)
        if len(set(ys)) > 1:
            best = own.index(by_arm[arm])
            axes.plot(xs[best], ys[best], marker="*", markersize=11, color=style["color"], markeredgecolor="black")
    axes.set_xlabel(f"{axis.key} (★: best)")
    axes.set_ylabel(words(by))
    plot_style.legend_above(figure, axes)
    return figure


def _places(axis: Choice | Range, rows: Sequence[Row]) -> dict[str, float]:
    """Place values on an axis: numbers where they are, all else one beside the other."""
    values = list({shown(row.point[axis.key]): row.point[axis.key] for row in rows}.values())
    if all(_is_number(value) for value in values):
        return {shown(value): float(value) for value in values}
    return {shown(value): float(place) for place, value in enumerate(values)}


def _heat_maps(axes: Sequence[Choice | Range], rows: Sequence[Row], by: str, title: str) -> Figure:
    """Draw a panel for each arm: the first key downwards, the second to the right."""
    _, by_arm = best_rows(rows, by)
    arms = list(by_arm)
    columns = min(3, max(1, len(arms)))
    label = f"{title}: {words(by)}, frame: best of the arm"
    figure, panels = plot_style.panels(math.ceil(max(1, len(arms)) / columns), columns, label)
    down, right = ([shown(value) for value in axis.values] for axis in axes if isinstance(axis, Choice))
    known = [scaled(value, by) for row in rows if (value := row.mean(by)) is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    for number, panel in enumerate(panel for line in panels for panel in line):
        if number >= len(arms):
            panel.set_visible(False)
            continue
        arm = arms[number]
        table = [[math.nan] * len(right) for _ in down]
        for row in (row for row in rows if row.arm == arm):
            value = row.mean(by)
            y, x = down.index(shown(row.point[axes[0].key])), right.index(shown(row.point[axes[1].key]))
            table[y][x] = math.nan if value is None else scaled(value, by)
        panel.imshow(table, cmap=_SCALE + ("_r" if by.endswith("loss") else ""), vmin=low, vmax=high, aspect="auto")
        _write_cells(panel, table, by, low, high)
        winner = by_arm[arm].point
        y, x = down.index(shown(winner[axes[0].key])), right.index(shown(winner[axes[1].key]))
        panel.plot([x - 0.46, x + 0.46, x + 0.46, x - 0.46, x - 0.46],
                   [y - 0.46, y - 0.46, y + 0.46, y + 0.46, y - 0.46], color="#D55E00", linewidth=2.5)  # fmt: skip
        panel.grid(visible=False)
        panel.set_xticks(range(len(right)), right)
        panel.set_yticks(range(len(down)), down)
        panel.set_xlabel(axes[1].key)
        panel.set_ylabel(axes[0].key)
        panel.set_title(arm, size=8, loc="left")
    figure.supxlabel(f"{words(by)}; the frame is the best of the arm", size=8)
    return figure


def _write_cells(panel: Axes, table: Sequence[Sequence[float]], by: str, low: float, high: float) -> None:
    for y, line in enumerate(table):
        for x, value in enumerate(line):
            if math.isnan(value):
                panel.text(x, y, "diverged", ha="center", va="center", size=8, color="#D55E00")
                continue
            part = (value - low) / (high - low) if high > low else 1.0
            bright = part < 0.5 if by.endswith("loss") else part > 0.5
            panel.text(x, y, f"{value:.{_digits(by)}f}", ha="center", va="center", color="black" if bright else "white")


def _parallel(axes: Sequence[Choice | Range], rows: Sequence[Row], by: str, title: str) -> Figure:
    """Draw a line for each point, from key to key and to its figure, for the arm with the best shared model."""
    winner, by_arm = best_rows(rows, by)
    arm = winner.arm if winner is not None else next(iter(by_arm), rows[0].arm)
    own = [row for row in rows if row.arm == arm and row.mean(by) is not None]
    figure, panel = plot_style.figure_of(f"{title}: {arm}, thick: best point")
    values = [scaled(row.figures[by]["mean"], by) for row in own]
    low, high = min(values, default=0.0), max(values, default=1.0)
    places = [_places(axis, own) for axis in axes]
    ends = [_ends(axis, place) for axis, place in zip(axes, places, strict=True)]
    import matplotlib

    scale = matplotlib.colormaps[_SCALE + ("" if by.endswith("loss") else "_r")]  # good ones are dark
    best = by_arm.get(arm)
    for row, value in sorted(zip(own, values, strict=True), key=lambda pair: pair[0] is best):
        heights = [
            _height(place[shown(row.point[axis.key])], end, axis)
            for axis, place, end in zip(axes, places, ends, strict=True)
        ]
        heights.append((value - low) / (high - low) if high > low else 0.5)
        colour, width = (plot_style.HIGHLIGHT, 3.5) if row is best else (scale(heights[-1]), 1.3)
        panel.plot(range(len(heights)), heights, color=colour, linewidth=width)
    for index, (axis, place, end) in enumerate(zip(axes, places, ends, strict=True)):
        panel.axvline(index, color="0.3", linewidth=1)
        ticks = list(place) if isinstance(axis, Choice) else [f"{end[0]:g}", f"{end[1]:g}"]
        for text in ticks:
            at = place[text] if isinstance(axis, Choice) else end[ticks.index(text)]
            panel.text(index - 0.03, _height(at, end, axis), text, ha="right", va="center", size=8)
    panel.axvline(len(axes), color="0.3", linewidth=1)
    for height, value in ((0.0, low), (1.0, high)):
        panel.text(len(axes) + 0.03, height, f"{value:.{_digits(by)}f}", ha="left", va="center", size=8)
    panel.set_xticks(range(len(axes) + 1), [*(axis.key for axis in axes), words(by)])
    panel.set_xlim(-0.4, len(axes) + 0.4)
    panel.set_yticks([])
    panel.grid(visible=False)
    for spine in panel.spines.values():
        spine.set_visible(False)
    panel.set_title(f"{arm} (thick: best point)", size=8, loc="left")
    return figure


def _ends(axis: Choice | Range, place: dict[str, float]) -> tuple[float, float]:
    if isinstance(axis, Range):
        return axis.low, axis.high
    return min(place.values(), default=0.0), max(place.values(), default=1.0)


def _height(value: float, ends: tuple[float, float], axis: Choice | Range) -> float:
    """Return where a value stands between the ends of its axis, from 0 to 1."""
    low, high = ends
    if isinstance(axis, Range) and axis.log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / (high - low) if high > low else 0.5


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
