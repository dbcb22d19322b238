"""What the page knows about single clients: decisions, losses, weights and contributions, round by round."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from fedalign.protocol.records import History
from fedalign.report.read_runs import RunFolder

#: one letter for each decision, as the page's script knows them
LETTERS = {"trained": "t", "admitted": "a", "base": "b", "declined": "d", "refused": "r", "lost": "l", "absent": "-"}
MOST_ROWS = 400_000  #: rounds × clients × runs whose details are kept; of larger runs every second, third … round
# Verified rounds say a client's contribution in the reason (protocol/verified.py).
_CONTRIBUTION = re.compile(r"the priority clients' loss changes by ([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?) %")


class Texts:
    """Numbers the texts it is given: a reason that many clients have is stored once."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Return the number of a text; the first one is 0."""
        return self.found.setdefault(text, len(self.found))


def rounded(value: float | None, digits: int = 4) -> float | None:
    """Round to significant digits, so that the page stays small.

    >>> rounded(0.123456), rounded(None), rounded(2.0)
    (0.1235, None, 2)
    """
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def detail_step(histories: Iterable[History]) -> int:
    """Return that every how manieth round is kept in detail, so that the page of a large run can still be opened."""
    rows = sum(len(r.clients) for history in histories for r in history.rounds)
    return -(-rows // MOST_ROWS) or 1


def client_columns(history: History, step: int, reasons: Texts) -> list[dict[str, Any]]:
    """Return the history of every client as columns: ``decisions`` has a letter a round, the others every ``step``."""
    if not history.rounds:
        return []
    shown = [r for r in history.rounds if r.round % step == 0]
    found = []
    for k, who in enumerate(history[0].clients):
        rows = [r.clients[k] for r in shown]
        contributions = [_contribution(row.reason) for row in rows]
        columns: dict[str, Any] = {
            "id": who.id,
            "priority": who.priority,
            "decisions": "".join(LETTERS[r.clients[k].decision] for r in history.rounds),
            "loss": [rounded(row.loss) for row in rows],
            "accuracy": [rounded(row.accuracy, 3) for row in rows],
            "weight": [rounded(row.weight, 3) for row in rows],
            "reasons": [reasons.number(row.reason) for row in rows],
        }
        if any(value is not None for value in contributions):
            columns["contribution"] = contributions
        if history[0].ledger is not None:
            columns["gave"] = _gave(history, who.id, step)
        found.append(columns)
    return found


def _gave(history: History, client: int, step: int) -> list[float | None]:
    """Return what a client gave so far, by the ledger, after every round that is shown."""
    total, found = 0.0, []
    for record in history.rounds:
        values = () if record.ledger is None else record.ledger.clients
        total += sum(one.gave for one in values if one.id == client and one.gave is not None)
        if record.round % step == 0:
            found.append(rounded(total))
    return found


def client_names(run: RunFolder) -> list[dict[str, Any]]:
    """Return the id and name of every client of a run, from the first round of any of its seeds."""
    for runs in run.histories.values():
        for history in runs.values():
            if history.rounds:
                return [{"id": c.id, "name": c.name} for c in history[0].clients]
    return []


def client_tests(run: RunFolder) -> dict[str, dict[str, float | None]]:
    """Return the final model's accuracy on each client's own test data, by arm, then client: a mean over seeds."""
    found: dict[str, dict[str, float | None]] = {}
    for arm, seeds in run.clients.items():
        values: dict[str, list[float]] = {}
        for rows in seeds.values():
            for row in rows:
                if row["test_accuracy"] is not None:
                    values.setdefault(str(row["id"]), []).append(row["test_accuracy"])
        found[arm] = {k: rounded(sum(own) / len(own)) for k, own in values.items()}
    return found


def _contribution(reason: str) -> float | None:
    match = _CONTRIBUTION.search(reason)
    return float(match.group(1)) if match else None
