"""The table of personal models, for the terminal and the HTML page: what clients have with each, and alone."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

TITLE = "Are clients better off than training alone, with the shared model and with personal ones?"
HEADINGS = ("arm", "clients", "model", "accuracy %", "alone %", "gain", "better off", "worse off")
NOTE = (
    "Accuracy on the clients' own test data after the last round: means over clients and seeds. Gain: points over the "
    "clients' local models (arm local). Better and worse off: clients, of those in the second column."
)


def personal_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for every arm, group of clients and model; nothing without personal models.

    ``summary`` is the content of ``summary.json``.
    """
    return [
        (
            arm,
            f"{figures['clients']:.0f} {group}",
            model,
            _number(figures["accuracy"], 100),
            _number(figures["own"], 100),
            _number(figures["gain"], 100, "+"),
            _number(figures["better_off"]),
            _number(figures["worse_off"]),
        )
        for arm, groups in summary.get("personal", {}).items()
        for group, models in groups.items()
        for model, figures in models.items()
    ]


def personal_table(summary: dict[str, Any]) -> Table | None:
    """Draw the table for a terminal; None without personal models."""
    found = personal_rows(summary)
    if not found:
        return None
    # Figures have room in a terminal of 80 columns: headings take two lines, and long names of arms wrap.
    table = Table(title=TITLE, caption=NOTE, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, heading in enumerate(HEADINGS):
        text = heading.replace(" ", "\n")
        table.add_column(text, justify="left" if index < 3 else "right", no_wrap=index > 0, overflow="fold")
    for cells in found:
        table.add_row(*cells)
    return table


def _number(value: float | None, scale: float = 1.0, sign: str = "") -> str:
    """Write a figure with one digit; – stands for none.

    >>> _number(0.125, 100, "+"), _number(None)
    ('+12.5', '–')
    """
    return "–" if value is None else f"{scale * value:{sign}.1f}"
