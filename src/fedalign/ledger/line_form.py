"""The form of a ledger's lines: a line whose hash holds may still be one that no ledger has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

FORMATS = (1, 2)  #: that this version reads; a ledger of version 1 has no closing line
CLOSED = "closed"  #: the key of the closing line, with the number of rounds

_Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _number(value: Any) -> bool:
    return _count(abs(value)) if isinstance(value, int) else isinstance(value, float) and math.isfinite(value)


def _number_or_none(value: Any) -> bool:
    return value is None or _number(value)


_FIRST: Mapping[str, _Check] = {
    "experiment": _text, "arm": _text, "seed": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "method": _text, "key": _text,
}  # fmt: skip
_ROUND: Mapping[str, _Check] = {
    "round": _count, "loss": _number_or_none, "gain": _number_or_none, "free_gain": _number_or_none, "models": _count,
    "note": _text, "clients": lambda value: isinstance(value, list),
}  # fmt: skip
_CLIENT: Mapping[str, _Check] = {
    "id": _count, "name": _text, "priority": _flag, "decision": _text, "reason": _text, "weight": _number,
    "gave": _number_or_none, "low": _number_or_none, "high": _number_or_none, "copies": _text, "loss": _number_or_none,
    "got": _number_or_none,
}  # fmt: skip
_VALUED = ("gave", "low", "high")  # None together, or not at all


def first_line_fault(row: Mapping[str, Any]) -> str | None:
    """Say what is wrong with a ledger's first line; None if it is one that this version reads.

    >>> first_line_fault({"ledger": 99})
    'has the format 99, and this version reads 1 and 2'
    >>> first_line_fault({"ledger": 1, "experiment": "", "arm": "all", "seed": 0, "method": "exact"})
    "is no first line of a ledger: it has no 'key'"
    """
    if not _count(row.get("ledger")) or row["ledger"] not in FORMATS:
        return f"has the format {row.get('ledger')!r:.20}, and this version reads {' and '.join(map(str, FORMATS))}"
    fault = _fault(row, _FIRST)
    return None if fault is None else f"is no first line of a ledger: it {fault}"


def round_fault(row: Mapping[str, Any]) -> str | None:
    """Say what is wrong with the line of a round; None if nothing is.

    >>> round_fault({"round": 0, "loss": None, "gain": "1", "free_gain": None, "models": 0, "note": "", "clients": []})
    "is no round of a ledger: it has '1' as 'gain'"
    """
    fault = _fault(row, _ROUND)
    for client in row["clients"] if fault is None else ():
        fault = fault or (_fault(client, _CLIENT) if isinstance(client, dict) else f"has the client {client!r:.20}")
        if fault is None and len({client[name] is None for name in _VALUED}) > 1:
            fault = "has a client with a part of a value"
    return None if fault is None else f"is no round of a ledger: it {fault}"


def _fault(row: Mapping[str, Any], checks: Mapping[str, _Check]) -> str | None:
    for name, holds in checks.items():
        if name not in row:
            return f"has no {name!r}"
        if not holds(row[name]):
            return f"has {row[name]!r:.20} as {name!r}"
    return None
