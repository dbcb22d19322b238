"""Pictures of a ledger: what every client gave in all, and how that grew over the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fedalign.report.plot_style import HIGHLIGHT, colour, panels, rounds_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST = 40  # clients with a bar of their own; of more, those that gave most and least
_CURVES = 5  # free clients with a curve of their own: those that gave most and least
_ROW = 0.13  # inches of a bar


def contributions(arm: str, rows: Sequence[Mapping[str, Any]], rounds: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw totals with their intervals, and in the last panel the sums so far of some clients of one seed.

    ``rows`` are totals by client, ``rounds`` the rows of one seed's ledger.
    """
    roles = [(role, own) for role in (True, False) if (own := _shown([row for row in rows if row["priority"] == role]))]
    height = max(2.3, 0.7 + _ROW * max(len(own) for _, own in roles))
    figure, (axes,) = panels(1, len(roles) + 1, f"what clients gave ({arm})", height=height)
    for place, (priority, own) in enumerate(roles):
        _bars(axes[place], own, "priority" if priority else "fedalign")
        axes[place].set_title("priority clients" if priority else "free clients", fontsize=8)
    _curves(axes[-1], roles[-1][1], rounds)
    return figure


def _shown(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list(rows) if len(rows) <= _MOST else [*rows[: _MOST // 2], *rows[-_MOST // 2 :]]


def _bars(axes: Axes, rows: Sequence[Mapping[str, Any]], style: str) -> None:
    """Draw totals; clients that harmed have a colour of their own."""
    places, gave = range(len(rows)), [row["gave"] for row in rows]
    tints = [colour(style, 0) if value > 0 else HIGHLIGHT for value in gave]
    axes.barh(places, gave, color=tints, height=0.7)
    ends = [[row["gave"] - row["low"] for row in rows], [row["high"] - row["gave"] for row in rows]]
    axes.errorbar(gave, list(places), xerr=ends, fmt="none", ecolor="0.25", elinewidth=0.7, capsize=1.2)
    axes.set_yticks(list(places), [_short(row["client"]) for row in rows], fontsize=5.5 if len(rows) > 12 else 7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.axvline(0, color="0.4", linewidth=0.8)
    axes.set_xlabel("fall of the priority clients' loss")


def _curves(axes: Axes, shown: Sequence[Mapping[str, Any]], rounds: Sequence[Mapping[str, Any]]) -> None:
    """Draw the sums so far of the clients that gave most and least."""
    names = [row["client"] for row in shown]
    half = -(-_CURVES // 2)
    chosen = list(dict.fromkeys([*names[:half], *names[-(_CURVES - half) :]]))
    for index, name in enumerate(chosen):
        steps = [sum(entry["gave"] or 0.0 for entry in row["clients"] if entry["name"] == name) for row in rounds]
        axes.plot(
            range(1, len(steps) + 1), list(accumulate(steps)), color=colour("", index), label=_short(name), linewidth=1
        )
    axes.axhline(0, color="0.4", linestyle=":", linewidth=0.8)
    axes.set_title("so far, first seed", fontsize=8)
    rounds_axis(axes)
    axes.legend(loc="best", fontsize=6, handlelength=1.2)


def _short(name: str) -> str:
    """Cut a long name; a dollar sign would begin a formula."""
    return (name if len(name) <= 18 else f"{name[:17]}…").replace("$", r"\$")
