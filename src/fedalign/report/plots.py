"""Pictures of a run: accuracy and loss over rounds with a band over seeds, and who was admitted when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedalign.protocol.records import History, RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedalign.data.federation import Federation

# Okabe and Ito's palette: distinguishable with any colour vision, and in print.
_COLOURS = {
    "priority": "#0072B2",
    "all": "#D55E00",
    "fedalign": "#009E73",
    "local": "#999999",
    "fedalign-train": "#E69F00",
    "auto": "#CC79A7",
}
_SPARE = ("#56B4E9", "#F0E442", "#000000", "#8C564B", "#7570B3", "#66A61E", "#D4376B", "#5F9EA0")
_STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "figure.dpi": 110,
    "savefig.dpi": 150,
    "svg.hashsalt": "fedalign",
}
Curves = Mapping[str, Mapping[int, History]]


def curves(arms: Curves, name: str, title: str, label: str, warmup: int, *, percent: bool = False) -> Figure:
    """Draw one number over rounds: the mean over seeds, and a band of one standard deviation."""
    figure, axes = figure_of()
    scale = 100.0 if percent else 1.0
    seen: list[float] = []
    for index, (arm, runs) in enumerate(arms.items()):
        table = _table(runs, name) * scale
        if not np.isfinite(table).any():
            continue
        known = np.isfinite(table).any(axis=0)  # a round may have no number, in no seed
        rounds, table = np.flatnonzero(known) + 1, table[:, known]
        mean = np.nanmean(table, axis=0)
        tint = colour(arm, index)
        spread = np.nanstd(table, axis=0, ddof=1) if table.shape[0] > 1 else np.zeros_like(mean)
        settled = slice(len(mean) // 20, None)  # the first rounds' steep climb must not flatten the rest
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
    axes.set(title=title, xlabel="communication round", ylabel=label)
    axes.margins(x=0.01)
    low, high = np.nanmin(seen), np.nanmax(seen)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - pad, high + pad)
    axes.legend(frameon=False, ncols=2)
    return figure


def admitted(runs: Mapping[int, History], title: str) -> Figure:
    """Draw the free clients that were admitted or in the base, round by round: the share of seeds in which each was."""
    histories = [history for history in runs.values() if len(history)]
    free = [c.id for c in histories[0][0].clients if not c.priority]
    names = [c.name for c in histories[0][0].clients if not c.priority]
    rounds = max(len(history) for history in histories)
    share = np.zeros((len(free), rounds))
    for history in histories:
        for r in history.rounds:
            for row, k in enumerate(free):
                share[row, r.round] += (r.clients[k].decision in ("admitted", "base")) / len(histories)
    figure, axes = figure_of(height=max(2.6, min(9.0, 0.9 + 0.24 * len(free))))
    image = axes.imshow(
        share, aspect="auto", interpolation="nearest", cmap="Greens", vmin=0, vmax=1,
        extent=(0.5, rounds + 0.5, len(free) - 0.5, -0.5),
    )  # fmt: skip
    step = max(1, len(free) // 25)
    axes.set_yticks(range(0, len(free), step), names[::step])
    axes.set(title=title, xlabel="communication round", ylabel="free client")
    axes.grid(visible=False)
    if not share.any():
        axes.text(0.5, 0.5, "no free client was admitted", transform=axes.transAxes, ha="center", color="0.35")
    based = any(r.base for history in histories for r in history.rounds)
    label = "admitted, or in the base" if based else "admitted"
    label = label if len(histories) == 1 else f"{label}\n(share of {len(histories)} seeds)"
    figure.colorbar(image, ax=axes, label=label)
    return figure


def costs(arms: Curves, title: str) -> Figure:
    """Draw test accuracy against what it cost: models sent both ways, and samples trained on; means over seeds."""
    figure, axes = panels(1, 2)
    spent: dict[str, Callable[[RoundRecord], int]] = {
        "models sent, up and down": lambda r: r.models_up + r.models_down,
        "samples trained on": lambda r: r.samples,
    }
    for axis, (label, cost) in zip(axes[0], spent.items(), strict=True):
        for index, (arm, runs) in enumerate(arms.items()):
            table = 100 * _table(runs, "test_accuracy")
            whole = [h for h in runs.values() if len(h) == table.shape[1]]
            if not np.isfinite(table).any() or not whole:
                continue
            total = np.mean([np.cumsum([cost(r) for r in h.rounds]) for h in whole], axis=0)
            if total[-1] > 0:
                axis.plot(total, np.nanmean(table, axis=0), color=colour(arm, index), label=arm, linewidth=1.5)
        axis.set_xlabel(label)
        axis.set_xscale("log")
    axes[0][0].set_ylabel("test accuracy (%)")
    handles, labels = axes[0][1].get_legend_handles_labels()
    figure.suptitle(title, fontsize=11)
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)), frameon=False)
    return figure


def incentive(tests: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]], alone: str, title: str) -> Figure | None:
    """Draw every free client's accuracy with each arm's shared model against that of its own model, all seeds."""
    figure, axes = figure_of(height=5.2)
    drawn = 0
    for index, (arm, seeds) in enumerate(tests.items()):
        own = {(seed, c["id"]): c["test_accuracy"] for seed, rows in tests[alone].items() for c in rows}
        points = [
            (100 * own[seed, c["id"]], 100 * c["test_accuracy"])
            for seed, rows in seeds.items()
            for c in rows
            if arm != alone
            and not c["priority"]
            and c["test_accuracy"] is not None
            and own.get((seed, c["id"])) is not None
        ]
        if points:
            drawn += len(points)
            better = sum(shared > mine for mine, shared in points)
            axes.scatter(
                *zip(*points, strict=True), s=14, alpha=0.55, color=colour(arm, index), linewidths=0,
                label=f"{arm}: {better} of {len(points)} better off",
            )  # fmt: skip
    axes.axline((0, 0), slope=1, color="0.4", linestyle=":", linewidth=1)
    axes.set(title=title, xlabel="own model, alone (%)", ylabel="shared model (%)", xlim=(-2, 102), ylim=(-2, 102))
    axes.legend(frameon=False, fontsize=9)
    if not drawn:
        import matplotlib.pyplot as plt

        plt.close(figure)
        return None
    return figure


def holdings(federation: Federation, title: str) -> Figure:
    """Draw how many samples of each class every client has (training and held-out), priority clients marked."""
    labels = federation.pool.y
    classes = int(labels.max()) + 1 if federation.pool.has_classes and labels.dim() == 1 else 1
    counts = np.zeros((len(federation), classes), np.int64)
    for k, client in enumerate(federation.clients):
        # Where nothing is held out, or one sample is both, a row must not count twice.
        rows = np.union1d(client.train, client.heldout)
        counts[k] = np.bincount(labels[rows].numpy(), minlength=classes) if classes > 1 else len(rows)
    height = max(2.6, min(11.0, 0.9 + 0.16 * len(federation)))
    figure, axes = figure_of(height=height)
    image = axes.imshow(counts, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0)
    names = [client.name for client in federation.clients]
    step = max(1, len(names) // 30)
    axes.set_yticks(range(0, len(names), step), names[::step])
    axes.set_xticks(range(0, classes, max(1, classes // 24)))
    for k, client in enumerate(federation.clients):
        if client.priority:
            axes.plot(-0.5, k, marker=">", color=_COLOURS["all"], markersize=7, clip_on=False)
    axes.plot([], [], marker=">", linestyle="", color=_COLOURS["all"], label="priority client")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0))
    axes.set_title(title, loc="left")
    axes.set(xlabel="class", ylabel="client")
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, label="samples")
    return figure


def selects(runs: Mapping[int, History]) -> bool:
    """Tell whether an arm chose among free clients: some were declined, refused or admitted, not all or none always."""
    seen = {c.decision for h in runs.values() for r in h.rounds for c in r.clients if not c.priority}
    return bool(seen & {"declined", "refused", "base"})


def save(figure: Figure, path: Path, suffixes: Sequence[str] = (".png", ".pdf")) -> list[Path]:
    """Write a picture as PNG and PDF."""
    import matplotlib.pyplot as plt

    written = []
    for suffix in suffixes:
        metadata = {"CreationDate": None} if suffix == ".pdf" else {}
        target = path.with_name(path.name + suffix)
        figure.savefig(target, bbox_inches="tight", metadata=metadata)
        written.append(target)
    plt.close(figure)
    return written


def figure_of(height: float = 4.2) -> tuple[Figure, Any]:
    """Make a figure with one pair of axes, in our style."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):  # type: ignore[arg-type]
        return plt.subplots(figsize=(7.2, height), layout="constrained")


def panels(rows: int, columns: int) -> tuple[Figure, Any]:
    """Make a figure of panels, in a table of axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):  # type: ignore[arg-type]
        return plt.subplots(
            rows, columns, figsize=(3.6 * columns + 0.4, 3.0 * rows + 0.4), layout="constrained", squeeze=False
        )


def _table(runs: Mapping[int, History], name: str) -> npt.NDArray[np.float64]:
    """Put one number into a table, seeds × rounds, with NaN where a run has none (it diverged)."""
    longest = max((len(history) for history in runs.values()), default=0)
    rows: list[Sequence[float]] = []
    for history in runs.values():
        values = [getattr(r, name) for r in history.rounds]
        there = [np.nan if v is None else float(v) for v in values]
        rows.append(there + [np.nan] * (longest - len(there)))
    table = np.array(rows, float).reshape(len(rows), longest)
    kept: npt.NDArray[np.float64] = table[~np.isnan(table).all(axis=1)]
    return kept


def colour(arm: str, index: int) -> str:
    """Give an arm's colour, the same in every picture."""
    return _COLOURS.get(arm, _SPARE[index % len(_SPARE)])
