"""Pictures with a row or a point for each client: admissions, accuracy with and without the federation, data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedalign.experiments.personal_summary import SHARED, accuracy_of
from fedalign.protocol.records import History
from fedalign.report.plot_style import HIGHLIGHT, MARKERS, colour, colour_bar, figure_of, legend_above, rounds_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedalign.data.federation import Federation


def selects(runs: Mapping[int, History]) -> bool:
    """Tell whether an arm ever chose among free clients, so that a picture of its admissions says something."""
    seen = {c.decision for h in runs.values() for r in h.rounds for c in r.clients if not c.priority}
    return bool(seen & {"declined", "refused", "base"})


def admitted(runs: Mapping[int, History], title: str) -> Figure:
    """Draw a heat map of free clients × rounds: the share of seeds in which a client's update was used.

    An update counts if it entered the aggregate or, with AutoALIGN, only the training model.
    """
    histories = [history for history in runs.values() if len(history)]
    free = [c.id for c in histories[0][0].clients if not c.priority]
    names = [c.name for c in histories[0][0].clients if not c.priority]
    rounds = max(len(history) for history in histories)
    share = np.zeros((len(free), rounds))
    for history in histories:
        for r in history.rounds:
            for row, k in enumerate(free):
                share[row, r.round] += (r.clients[k].decision in ("admitted", "base")) / len(histories)
    figure, axes = figure_of(title, max(1.8, min(7.0, 0.7 + 0.13 * len(free))))
    image = axes.imshow(
        share, aspect="auto", interpolation="nearest", cmap="Greens", vmin=0, vmax=1,
        extent=(0.5, rounds + 0.5, len(free) - 0.5, -0.5),
    )  # fmt: skip
    step = max(1, len(free) // 25)
    axes.set_yticks(range(0, len(free), step), names[::step])
    axes.set(ylabel="free client")
    rounds_axis(axes)
    axes.grid(visible=False)
    if not share.any():
        axes.text(0.5, 0.5, "no free client was admitted", transform=axes.transAxes, ha="center", color="0.35")
    two_models = any(r.base for history in histories for r in history.rounds)
    label = "used" if two_models else "admitted"
    label = label if len(histories) == 1 else f"{label}\n(share of {len(histories)} seeds)"
    colour_bar(figure, image, axes, label)
    return figure


def incentive(
    tests: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]],
    alone: str,
    title: str,
    model: str = SHARED,
    *,
    priority: bool = False,
) -> Figure | None:
    """Plot each free client's accuracy with an arm's shared model against that with its own local model.

    ``tests`` holds the final accuracy of every client by arm and seed, ``alone`` names the arm of local training.
    ``model`` is a personal method in place of the shared model, and ``priority`` asks for the priority clients.
    Returns None if no such client has both accuracies.
    """
    own = {(seed, c["id"]): c["test_accuracy"] for seed, rows in tests[alone].items() for c in rows}
    pairs = {
        arm: [
            (100 * own[seed, c["id"]], 100 * accuracy)
            for seed, rows in seeds.items()
            for c in rows
            if c["priority"] == priority
            and (accuracy := accuracy_of(c, model)) is not None
            and own.get((seed, c["id"])) is not None
        ]
        for arm, seeds in tests.items()
        if arm != alone
    }
    if not any(pairs.values()):
        return None
    figure, axes = figure_of(title, 3.4)
    for index, arm in enumerate(tests):
        if points := pairs.get(arm):
            better = sum(shared > local for local, shared in points)
            axes.scatter(
                [local for local, _ in points],
                [shared for _, shared in points],
                s=9,
                marker=MARKERS[index % len(MARKERS)],
                facecolors="none",
                edgecolors=colour(arm, index),
                linewidths=0.6,
                label=f"{arm}: {better} of {len(points)} better off",
            )
    axes.axline((0, 0), slope=1, color="0.4", linestyle=":", linewidth=0.8)
    words = "the shared model" if model == SHARED else f"the model of {model}"
    axes.set(
        xlabel="accuracy with its own local model (%)", ylabel=f"accuracy with {words} (%)",
        xlim=(-2, 102), ylim=(-2, 102),
    )  # fmt: skip
    legend_above(figure, axes, 2)
    return figure


def class_counts(federation: Federation, title: str) -> Figure:
    """Draw a heat map of clients × classes: how many samples each client has for training and held-out evaluation."""
    labels = federation.pool.y
    classes = int(labels.max()) + 1 if federation.pool.has_classes and labels.dim() == 1 else 1
    counts = np.zeros((len(federation), classes), np.int64)
    for k, client in enumerate(federation.clients):
        # A client with a single sample trains and evaluates on it: count it once.
        rows = np.union1d(client.train, client.heldout)
        counts[k] = np.bincount(labels[rows].numpy(), minlength=classes) if classes > 1 else len(rows)
    figure, axes = figure_of(title, max(1.8, min(8.0, 0.7 + 0.1 * len(federation))))
    image = axes.imshow(counts, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0)
    names = [client.name for client in federation.clients]
    step = max(1, len(names) // 30)
    axes.set_yticks(range(0, len(names), step), names[::step])
    axes.set_xticks(range(0, classes, max(1, classes // 24)))
    for k, client in enumerate(federation.clients):
        if client.priority:
            axes.plot(-0.5, k, marker=">", color=HIGHLIGHT, markersize=4, clip_on=False)
    axes.plot([], [], marker=">", linestyle="", color=HIGHLIGHT, label="priority client")
    legend_above(figure, axes)
    axes.set(xlabel="class", ylabel="client")
    axes.grid(visible=False)
    colour_bar(figure, image, axes, "samples")
    return figure
