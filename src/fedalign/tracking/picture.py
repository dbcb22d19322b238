"""The picture of one run that trackers show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedalign.protocol.records import RoundRecord
from fedalign.report.plot_style import rounds_axis

# Okabe and Ito's colours, and greys from dark to light for those that are not in the model.
_COLOURS = {
    "trained": "#0072B2",
    "admitted": "#009E73",
    "base": "#56B4E9",
    "refused": "#D55E00",
    "declined": "#E69F00",
    "lost": "#000000",
    "absent": "#E5E5E5",
}


def draw(records: Sequence[RoundRecord], title: str) -> Figure:
    """Draw a run's figures over the rounds, and the decision about every client in every round."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")  # not pyplot's, which would keep it open
    curves, decisions = figure.subplots(1, 2)
    rounds = [record.round + 1 for record in records]
    for name, style in (("test_accuracy", "-"), ("global_loss", "--"), ("test_loss", ":")):
        values = [getattr(record, name) for record in records]
        if any(value is not None for value in values):
            curves.plot(rounds, [np.nan if v is None else v for v in values], style, label=name.replace("_", " "))
    curves.grid(alpha=0.25)
    curves.set_title(title, loc="left", fontsize=9)
    rounds_axis(curves)
    if curves.lines:
        curves.legend(frameon=False, fontsize=8)
    names = list(_COLOURS)
    clients = max(len(record.clients) for record in records)
    table = np.full((clients, len(records)), names.index("absent"))
    for column, record in enumerate(records):
        for client in record.clients:
            table[client.id, column] = names.index(client.decision)
    decisions.imshow(
        table, aspect="auto", interpolation="nearest", cmap=ListedColormap(list(_COLOURS.values())),
        norm=BoundaryNorm(np.arange(len(names) + 1) - 0.5, len(names)),
        extent=(rounds[0] - 0.5, rounds[-1] + 0.5, clients - 0.5, -0.5),
    )  # fmt: skip
    decisions.set(ylabel="client")
    decisions.yaxis.set_major_locator(MaxNLocator(integer=True))
    rounds_axis(decisions)
    seen = [name for place, name in enumerate(names) if (table == place).any()]
    figure.legend(
        handles=[Patch(color=_COLOURS[name], label=name) for name in seen],
        loc="outside lower center", ncols=len(seen), frameon=False, fontsize=8,
    )  # fmt: skip
    return figure
