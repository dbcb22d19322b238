"""The terminal's table of the users' metrics: a row for each arm, a column for each metric and group of clients."""

from __future__ import annotations

from typing import Any

from rich.table import Table

_MOST = 4  # metrics that fit into a terminal; the others are in summary.json


def metrics_table(summary: dict[str, Any]) -> Table | None:
    """Draw the metrics of all arms for priority and free clients; None if there are none.

    ``summary`` is the content of ``summary.json``. More metrics than fit into a terminal are only counted.
    """
    arms: dict[str, Any] = summary["arms"]
    names = list(dict.fromkeys(name for figures in arms.values() for name in figures.get("metrics", {})))
    if not names:
        return None
    more = f" {len(names) - _MOST} more are in summary.json." if len(names) > _MOST else ""
    caption = f"Means over priority | free clients, last 10 rounds.{more}"
    table = Table(title="Metrics", caption=caption)
    table.add_column("arm", no_wrap=True)
    for name in names[:_MOST]:
        table.add_column(name, justify="right", no_wrap=True)
    for arm, figures in arms.items():
        own = figures.get("metrics", {})
        table.add_row(arm, *(_cell(own.get(name)) for name in names[:_MOST]))
    return table


def _cell(values: dict[str, Any] | None) -> str:
    """Write a metric of both groups; – stands for none.

    >>> _cell({"priority": {"mean": 0.5}, "free": {"mean": None}})
    '0.5000 | –'
    """
    means = [None if values is None else values[group]["mean"] for group in ("priority", "free")]
    return " | ".join("–" if mean is None else f"{mean:.4f}" for mean in means)
