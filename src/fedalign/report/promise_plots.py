"""A picture of the promise: by how much the served model may be worse than the priority clients' own, over rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fedalign.protocol.records import History, Promise
from fedalign.report.plot_style import colour, figure_of, legend_above, rounds_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def promises(arms: Mapping[str, Mapping[int, History]], title: str) -> Figure | None:
    """Plot the bounds of every round, the largest over seeds: solid as if the data were fresh, dashed the strict one.

    Points are the measured differences, the mean over seeds. Returns None if no round has a promise.
    """
    shown = [(index, arm, _by_round(runs)) for index, (arm, runs) in enumerate(arms.items())]
    if not any(rounds for _, _, rounds in shown):
        return None
    figure, axes = figure_of(title)
    for index, arm, rounds in shown:
        if not rounds:
            continue
        tint, x = colour(arm, index), [t + 1 for t in rounds]
        measured = [
            100 * np.mean([(p.lost - p.gained) / max(p.samples, 1) for p in every]) for every in rounds.values()
        ]
        axes.plot(x, measured, ".", ms=2, mew=0, color=tint)
        axes.plot(x, [_worst(every, "worse_by") for every in rounds.values()], color=tint, linewidth=1.1, label=arm)
        axes.plot(x, [_worst(every, "strict") for every in rounds.values()], "--", color=tint, linewidth=0.9)
    axes.axhline(0.0, color="0.4", linestyle=":", linewidth=1)
    axes.set(ylabel="worse than priority-only\n(percentage points)")
    for style, name in ((".", "measured"), ("-", "bound"), ("--", "strict bound")):
        axes.plot([], [], style, color="0.35", label=name)
    rounds_axis(axes)
    legend_above(figure, axes)
    return figure


def _by_round(runs: Mapping[int, History]) -> dict[int, list[Promise]]:
    found: dict[int, list[Promise]] = {}
    for history in runs.values():
        for record in history.rounds:
            if record.promise is not None and record.promise.worse_by is not None:
                found.setdefault(record.round, []).append(record.promise)
    return dict(sorted(found.items()))


def _worst(every: list[Promise], name: str) -> float:
    return 100 * max(float(getattr(promise, name)) for promise in every)
