"""Pictures of AutoALIGN's decisions: the ε that the evaluators chose, and the candidates they chose among."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedalign.protocol.records import History, RoundRecord
from fedalign.report.plot_style import MARKERS, figure_of, legend_above, rounds_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def chosen_epsilon(runs: Mapping[int, History], title: str) -> Figure | None:
    """Plot the ε of the chosen candidate in every round, one colour for each seed.

    A cross at ε = 0 marks a round in which the fallback, the priority-only model, was served instead. Returns None
    if no round had candidates with an ε.
    """
    histories = {
        seed: history
        for seed, history in runs.items()
        if any(one.epsilon is not None for r in history.rounds for one in r.tried)
    }
    if not histories:
        return None
    figure, axes = figure_of(title, 2.8)
    picked = {
        seed: [(r.round + 1, r.epsilon) for r in history.rounds if r.tried and r.epsilon is not None]
        for seed, history in histories.items()
    }
    finite = [e for points in picked.values() for _, e in points if 0 < e < np.inf]
    top = 2 * max(finite, default=1.0)  # where ∞ is drawn
    for number, (tint, (seed, points)) in enumerate(zip(_tints(len(picked)), picked.items(), strict=True)):
        x, y = [at for at, _ in points], np.minimum([e for _, e in points], top)
        axes.plot(x, y, _marker(number), ms=2.2, mew=0, color=tint, label=f"seed {seed}", clip_on=False)
        fallback = [r.round + 1 for r in histories[seed].rounds if fallback_served(r)]
        if fallback:
            axes.plot(fallback, [0] * len(fallback), "x", ms=3, mew=0.7, color=tint, clip_on=False, zorder=3)
    if any(fallback_served(r) for history in histories.values() for r in history.rounds):
        axes.plot([], [], "x", ms=3, mew=0.7, color="black", label="fallback: priority-only model served")
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_ylim(0, 1.1 * top)
    if any(e == np.inf for points in picked.values() for _, e in points):
        axes.set_yticks([*(tick for tick in axes.get_yticks() if tick < top), top])
        labels = [f"{tick:g}" for tick in axes.get_yticks()[:-1]]
        axes.set_yticklabels([*labels, "∞"])
    axes.set(ylabel="chosen ε (0: no free client)")
    rounds_axis(axes)
    legend_above(figure, axes, 2)
    return figure


def candidate_losses(runs: Mapping[int, History], title: str) -> Figure | None:
    """Plot every candidate's held-out loss relative to the candidate without free clients; the chosen ones by seed.

    Returns None if no round had candidates, or none of them was without free clients.
    """
    others: list[tuple[int, float]] = []
    picked: dict[int, list[tuple[int, float]]] = {}
    for seed, history in runs.items():
        for r in history.rounds:
            nobody = next((t.loss for t in r.tried if t.admitted == 0 and t.loss is not None and t.loss > 0), None)
            if nobody is None:
                continue
            for t in r.tried:
                if t.loss is not None and t.loss > 0:  # 0 has no place on a logarithmic axis
                    (picked.setdefault(seed, []) if t.chosen else others).append((r.round + 1, t.loss / nobody))
    if not picked:
        return None
    figure, axes = figure_of(title, 2.8)
    axes.plot(*_columns(others), ".", ms=1.5, mew=0, color="0.7", label="other candidates", rasterized=True)
    axes.axhline(1.0, color="0.4", linestyle=":", linewidth=0.8)
    for number, (tint, (seed, points)) in enumerate(zip(_tints(len(picked)), picked.items(), strict=True)):
        axes.plot(*_columns(points), _marker(number), ms=2.2, mew=0, color=tint, label=f"chosen, seed {seed}")
    low = min(share for points in picked.values() for _, share in points)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.1, max(1 / low, 2.0))  # far worse candidates would flatten the rest
    steps = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5, 10, 20)
    ticks = [tick for tick in steps if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set(ylabel="held-out loss, relative to\nthat without free clients")
    rounds_axis(axes)
    legend_above(figure, axes, 2)
    return figure


def fallback_served(record: RoundRecord) -> bool:
    """Tell whether the priority-only model was served in a round, in place of the chosen candidate."""
    return bool(record.tried and record.fallback and record.fallback.behind)


def _marker(number: int) -> str:
    return MARKERS[number % len(MARKERS)]


def _tints(seeds: int) -> npt.NDArray[np.float64]:
    from matplotlib import colormaps

    return np.asarray(colormaps["viridis"](np.linspace(0, 0.85, seeds)))


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [at for at, _ in points], [value for _, value in points]
