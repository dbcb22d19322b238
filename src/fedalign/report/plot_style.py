"""The look that all pictures share: one colour for each arm, one style for axes, and one way to save a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinguishable with any colour vision, and in print.
_COLOURS = {
    "priority": "#0072B2",
    "all": "#D55E00",
    "fedalign": "#009E73",
    "local": "#999999",
    "fedalign-train": "#E69F00",
    "auto": "#CC79A7",
}
_SPARE_COLOURS = ("#56B4E9", "#F0E442", "#000000", "#8C564B", "#7570B3", "#66A61E", "#D4376B", "#5F9EA0")
HIGHLIGHT = _COLOURS["all"]  #: marks single items in pictures that do not compare arms
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


def colour(arm: str, index: int) -> str:
    """Return the colour of an arm: fixed for the built-in arms, otherwise chosen by the arm's ``index`` in the run.

    >>> colour("priority", 3), colour("my-arm", 0)
    ('#0072B2', '#56B4E9')
    """
    return _COLOURS.get(arm, _SPARE_COLOURS[index % len(_SPARE_COLOURS)])


def style_numbers(arms: Sequence[str]) -> dict[str, int]:
    """Number the arms' styles: the built-in arms always have the same one, others those that come after.

    >>> style_numbers(["auto", "mine", "priority"])
    {'auto': 5, 'mine': 6, 'priority': 0}
    """
    fixed = list(_COLOURS)
    others = [arm for arm in dict.fromkeys(arms) if arm not in fixed]
    return {arm: fixed.index(arm) if arm in fixed else len(fixed) + others.index(arm) for arm in arms}


def figure_of(height: float = 4.2) -> tuple[Figure, Axes]:
    """Make a figure with one pair of axes, ``height`` inches high."""
    figure, axes = _subplots(1, 1, (7.2, height))
    return figure, axes[0][0]


def panels(rows: int, columns: int) -> tuple[Figure, Sequence[Sequence[Axes]]]:
    """Make a figure with a grid of panels; the axes are indexed as ``axes[row][column]``."""
    return _subplots(rows, columns, (3.6 * columns + 0.4, 3.0 * rows + 0.4))


def rounds_axis(axes: Axes) -> None:
    """Label the x axis as communication rounds, with ticks at whole rounds."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("communication round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def save(figure: Figure, path: Path, suffixes: Sequence[str] = (".png", ".pdf")) -> list[Path]:
    """Write a figure to ``path`` plus each suffix, close it, and return the files' paths."""
    import matplotlib.pyplot as plt

    written = []
    for suffix in suffixes:
        metadata = {"CreationDate": None} if suffix == ".pdf" else {}  # the same run gives the same bytes
        target = path.with_name(path.name + suffix)
        figure.savefig(target, bbox_inches="tight", metadata=metadata)
        written.append(target)
    plt.close(figure)
    return written


def _subplots(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):  # type: ignore[arg-type]
        return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
