"""Reads the audit log of a run over Flower, which ``fedalign.flower.audit`` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedalign.monitoring.rotation import files
from fedalign.monitoring.words import printable

NAME = "audit.jsonl"  #: the file in the run's folder: one JSON object a line
HEADINGS = ("time", "round", "event", "client", "details")


def read(folder: Path, last: int | None = None) -> list[dict[str, Any]]:
    """Return the events of a run's folder, oldest first, or the ``last`` of them.

    A line that a kill cut short is left out.

    >>> read(Path("no-such-folder"))
    []
    """
    found: list[dict[str, Any]] = []
    try:
        for path in reversed(files(folder / NAME)):
            for line in reversed(path.read_text(encoding="utf-8", errors="replace").splitlines()):
                if last is not None and len(found) >= last:
                    break
                if (event := _event(line)) is not None:
                    found.append(event)
    except FileNotFoundError:  # it was rotated just now
        return read(folder, last)
    return found[::-1]


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def event_row(event: Mapping[str, Any]) -> list[str]:
    """Return an event's row of the table with the columns :data:`HEADINGS`.

    >>> event_row({"time": "2026-11-16T19:00:00.000+00:00", "event": "run_paused", "details": {"reason": "no quorum"}})
    ['2026-11-16 19:00:00', '–', 'run_paused', '–', 'reason: no quorum']
    """
    details = event.get("details")
    known = (
        {key: value for key, value in details.items() if value not in ("", None)} if isinstance(details, dict) else {}
    )
    told = "; ".join(f"{key}: {value}" for key, value in known.items())
    cells = [event.get(key) for key in ("round", "event", "client")]
    when = str(event.get("time", "–")).replace("T", " ")[:19]
    return [printable(when), *(printable("–" if cell is None else str(cell)) for cell in cells), printable(told or "–")]
