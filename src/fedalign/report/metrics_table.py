"""The table of the users' metrics, for the terminal and the HTML page: a row for each arm, a column for each metric."""

from __future__ import annotations

from typing import Any

from rich.table import Table

_MOST = 4  # metrics that fit into a terminal; the others are in summary.json
TITLE = "Metrics"
NOTE = "Means over priority | free clients, last 10 rounds."


def metric_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Return the headings, then a row for each arm: its metrics for priority and free clients; nothing without metrics.

    ``summary`` is the content of ``summary.json``.
    """
    arms: dict[str, Any] = summary["arms"]
    names = list(dict.fromkeys(name for figures in arms.values() for name in figures.get("metrics", {})))
    if not names:
        return []
    rows = [[arm, *(_cell(own.get("metrics", {}).get(name)) for name in names)] for arm, own in arms.items()]
    return [["arm", *names], *rows]


def metrics_table(summary: dict[str, Any]) -> Table | None:
    """Draw the metrics of all arms for a terminal; None if there are none, and more than fit are only counted."""
    found = metric_rows(summary)
    if not found:
        return None
    left = len(found[0]) - 1 - _MOST
    table = Table(title=TITLE, caption=f"{NOTE} {left} more are in summary.json." if left > 0 else NOTE)
    for heading in found[0][: _MOST + 1]:
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    for row in found[1:]:
        table.add_row(*row[: _MOST + 1])
    return table


def _cell(values: dict[str, Any] | None) -> str:
    """Write a metric of both groups; – stands for none.

    >>> _cell({"priority": {"mean": 0.5}, "free": {"mean": None}})
    '0.5000 | –'
    """
    means = [None if values is None else values[group]["mean"] for group in ("priority", "free")]
    return " | ".join("–" if mean is None else f"{mean:.4f}" for mean in means)
