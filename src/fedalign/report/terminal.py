"""All tables of a run for a terminal: arms, metrics, what free clients gain, and the bounds of the theory."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from fedalign.report.metrics_table import metrics_table
from fedalign.report.personal_table import personal_table
from fedalign.report.table import incentive_table, terminal_table
from fedalign.report.theory_table import theory_table


def tables(summary: dict[str, Any]) -> list[Table | str]:
    """Draw the tables that a run has; ``summary`` is the content of ``summary.json``."""
    found: list[Table | str] = [terminal_table(summary)]
    if (metrics := metrics_table(summary)) is not None:
        found.append(metrics)
    gains = personal_table(summary) or incentive_table(summary)
    if gains is not None:
        found.append(gains)
    if "theory" in summary:
        found.append(theory_table(summary["theory"]))
    return found
