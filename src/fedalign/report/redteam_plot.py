"""The heat map of a red team, and the colours that its page shares with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedalign.experiments.redteam_table import Worst
from fedalign.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Vermilion and sky blue are told apart with any colour vision.
_LOSS, _EVEN, _GAIN = (213, 94, 0), (255, 255, 255), (86, 180, 233)
_FULL_LOSS, _FULL_GAIN = 50.0, 10.0  # points at which the colours are full
_CELL, _LETTER = 0.85, 0.07  # inches


def tint(gain: float) -> str:
    """Return the colour of a gain in points: vermilion below 0, blue above; black text can be read on all.

    The scale is logarithmic, so that losses of 1, 5 and 70 points are told apart, and a few tenths stay pale.

    >>> tint(0.0), tint(-80.0)
    ('#ffffff', '#d55e00')
    """
    most, end = (_FULL_LOSS, _LOSS) if gain < 0 else (_FULL_GAIN, _GAIN)
    part = min(1.0, math.log1p(abs(gain)) / math.log1p(most))
    mixed = (round(a + (b - a) * part) for a, b in zip(_EVEN, end, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def signed(points: float) -> str:
    """Write points with one digit, a sign and a true minus.

    >>> signed(-0.04), signed(-12.34), signed(2.5)
    ('0.0', '−12.3', '+2.5')
    """
    text = f"{points:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


def heat_map(worst: Sequence[Worst], title: str) -> Figure:
    """Draw the worst case over attacks: a row for each rule, a column for each fraction of hostile free clients.

    The large number is the mean over seeds, the small one that of the worst seed.
    """
    rules = list(dict.fromkeys(one.rule for one in worst))
    fractions = sorted({one.fraction for one in worst})
    width = _CELL * len(fractions) + _LETTER * max(map(len, rules))
    figure, axes = plot_style.figure_of(title, 0.8 + 0.36 * len(rules), max(plot_style.COLUMN, width))
    axes.grid(visible=False)
    for one in worst:
        x, y = fractions.index(one.fraction), rules.index(one.rule)
        axes.fill_between([x - 0.49, x + 0.49], y - 0.48, y + 0.48, color=tint(one.gain), linewidth=0)
        axes.text(x, y - 0.12, signed(one.gain), ha="center", va="center", size=8, weight="bold")
        seed = f"worst seed {signed(one.worst_seed)}"
        axes.text(x, y + 0.27, seed, ha="center", va="center", size=5)
    axes.set_xlim(-0.5, len(fractions) - 0.5)
    axes.set_ylim(len(rules) - 0.5, -0.5)
    axes.set_xticks(range(len(fractions)), [_column(fraction) for fraction in fractions])
    axes.set_yticks(range(len(rules)), rules)
    axes.tick_params(length=0)
    axes.xaxis.tick_top()
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("points of test accuracy above priority, worst of all attacks", size=7)
    return figure


def _column(fraction: float) -> str:
    return "no attack" if fraction == 0 else f"{100 * fraction:g} % hostile"
