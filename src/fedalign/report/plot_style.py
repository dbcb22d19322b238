"""The look that all pictures share: a colour and a line style for each arm, one style for axes, one way to save.

Pictures are made for papers: as wide as a column or a page of text, 300 dots an inch, and told apart without colours. A
picture's title is in its file, not in the drawing, because papers have captions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
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
_SPARE_COLOURS = ("#56B4E9", "#B8860B", "#000000", "#8C564B", "#7570B3", "#66A61E", "#D4376B", "#5F9EA0")
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.2, 1, 1.2)), (0, (3, 1)), (0, (7, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")  #: tell seeds or arms apart without colours
COLUMN, TEXT = 3.5, 7.16  #: widths in inches: of a column, and of a page of two columns
HIGHLIGHT = _COLOURS["all"]  #: marks single items in pictures that do not compare arms
_STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.1,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "legend.columnspacing": 1.2,
    "figure.dpi": 300,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # text stays text: publishers refuse the default, Type 3
    "svg.hashsalt": "fedalign",
}


def colour(arm: str, index: int) -> str:
    """Return the colour of an arm: fixed for the built-in arms, otherwise chosen by the arm's ``index`` in the run.

    >>> colour("priority", 3), colour("my-arm", 0)
    ('#0072B2', '#56B4E9')
    """
    return _COLOURS.get(arm, _SPARE_COLOURS[index % len(_SPARE_COLOURS)])


def line(arm: str, index: int) -> dict[str, Any]:
    """Return the colour and line style of an arm, as keywords of Matplotlib's ``plot``.

    >>> line("priority", 3)
    {'color': '#0072B2', 'linestyle': '-'}
    """
    number = list(_COLOURS).index(arm) if arm in _COLOURS else index + 1
    return {"color": colour(arm, index), "linestyle": _LINES[number % len(_LINES)]}


def style_numbers(arms: Sequence[str]) -> dict[str, int]:
    """Number the arms' styles: the built-in arms always have the same one, others those that come after.

    >>> style_numbers(["auto", "mine", "priority"])
    {'auto': 5, 'mine': 6, 'priority': 0}
    """
    fixed = list(_COLOURS)
    others = [arm for arm in dict.fromkeys(arms) if arm not in fixed]
    return {arm: fixed.index(arm) if arm in fixed else len(fixed) + others.index(arm) for arm in arms}


def figure_of(title: str = "", height: float = 2.5, width: float = COLUMN) -> tuple[Figure, Axes]:
    """Make a figure as wide as a column, unless ``width`` says otherwise, with one pair of axes; sizes in inches."""
    figure, axes = _subplots(1, 1, (width, height), title)
    return figure, axes[0][0]


def panels(
    rows: int, columns: int, title: str = "", *, height: float = 2.3, **options: Any
) -> tuple[Figure, Sequence[Sequence[Axes]]]:
    """Make a figure with a grid of panels; the axes are indexed as ``axes[row][column]``.

    It is as wide as a page of text, or as a column if it has one column of panels; a row is ``height`` inches high.
    """
    return _subplots(rows, columns, (TEXT if columns > 1 else COLUMN, height * rows + 0.3), title, **options)


def legend_above(figure: Figure, axes: Axes, columns: int = 3) -> None:
    """Put the legend above the axes, where it hides no data."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        with _styled():  # spacing and font sizes are read when a legend is made
            figure.legend(handles, labels, loc="outside upper center", ncols=min(columns, len(labels)))


def colour_bar(figure: Figure, image: Any, axes: Axes, label: str) -> None:
    """Put the scale of a heat map beside it."""
    with _styled():
        figure.colorbar(image, ax=axes, label=label)


def rounds_axis(axes: Axes) -> None:
    """Label the x axis as communication rounds, with ticks at whole rounds."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("communication round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def save(figure: Figure, path: Path, suffixes: Sequence[str] = (".png", ".pdf")) -> list[Path]:
    """Write a figure to ``path`` plus each suffix, and return the files' paths."""
    written = []
    for suffix in suffixes:
        metadata: dict[str, str | None] = {"Title": str(figure.get_label())}
        if suffix == ".pdf":
            metadata |= {"CreationDate": None}  # the same run gives the same bytes
        target = path.with_name(path.name + suffix)
        with _styled():
            figure.savefig(target, metadata=metadata)
        written.append(target)
    return written


def _styled() -> AbstractContextManager[None]:
    import matplotlib

    return matplotlib.rc_context(_STYLE)  # type: ignore[arg-type]


def _subplots(rows: int, columns: int, size: tuple[float, float], title: str, **options: Any) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    with _styled():
        figure = Figure(figsize=size, layout="constrained")  # not pyplot's: that would change how notebooks show plots
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    figure.set_label(title)
    return figure, axes
