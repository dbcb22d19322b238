"""What every client gave and got in all rounds of a ledger, with the reasons why it was refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_USED = ("trained", "admitted", "base")
_NOT_USED = ("refused", "declined")


@dataclass
class Account:
    """One client's totals.

    ``gave`` has the 95 % interval from ``low`` to ``high``. ``got`` is by how much the client's own loss of the model
    that it receives fell from the first round to the last. A free client reports that loss itself; nobody checks it.
    ``used`` counts the rounds whose models have its update, ``copies`` those in which it sent a copy. ``refused`` has
    the reasons for the others, with the number of rounds.
    """

    name: str
    priority: bool
    rounds: int = 0
    used: int = 0
    gave: float = 0.0
    got: float | None = None
    copies: int = 0
    unvalued: int = 0  #: rounds that used its update and could not value it
    refused: Counter[str] = field(default_factory=Counter)
    _square: float = 0.0

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.gave - math.sqrt(self._square)

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.gave + math.sqrt(self._square)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add a client's entry of a round. Rounds are drawn independently, so squares of half intervals add up."""
        self.rounds += 1
        self.used += entry["decision"] in _USED
        self.copies += bool(entry["copies"])
        if entry["gave"] is None:
            self.unvalued += 1
        else:
            self.gave += entry["gave"]
            half = (entry["high"] - entry["low"]) / 2
            self._square += half * half  # which may be infinite; a power raises an error then
        if entry["got"] is not None:
            self.got = (self.got or 0.0) + entry["got"]
        if entry["decision"] in _NOT_USED:
            self.refused[f"{entry['decision']}: {entry['reason']}"] += 1

    def as_json(self) -> dict[str, Any]:
        """Return the totals for JSON and CSV, the most frequent reason among them."""
        reason = self.refused.most_common(1)[0][0] if self.refused else ""
        return {
            "client": self.name,
            "priority": self.priority,
            "gave": self.gave,
            "low": self.low,
            "high": self.high,
            "got": self.got,
            "rounds": self.rounds,
            "used": self.used,
            "copies": self.copies,
            "unvalued": self.unvalued,
            "refused": self.refused.total(),
            "reason": reason,
        }


def accounts(rows: Iterable[Mapping[str, Any]]) -> dict[int, Account]:
    """Add up the rounds of a ledger, by client.

    >>> entry = {"id": 3, "name": "c", "priority": False, "decision": "admitted", "reason": "", "copies": ""}
    >>> rows = [{"clients": [{**entry, "gave": 0.5, "low": 0.1, "high": 0.9, "got": got}]} for got in (None, 0.2)]
    >>> total = accounts(rows)[3]
    >>> total.gave, round(total.low, 4), total.got, total.used
    (1.0, 0.4343, 0.2, 2)
    """
    found: dict[int, Account] = {}
    for row in rows:
        for entry in row["clients"]:
            found.setdefault(entry["id"], Account(entry["name"], entry["priority"])).add(entry)
    return found


def mean_accounts(of_seeds: Sequence[Mapping[int, Account]]) -> list[dict[str, Any]]:
    """Average totals over seeds, by the clients' names, those that gave most first; counts are averaged, too."""
    found: dict[str, list[dict[str, Any]]] = {}
    for of_seed in of_seeds:
        for account in of_seed.values():
            found.setdefault(account.name, []).append(account.as_json())
    rows = []
    for name, some in found.items():
        n, gave = len(some), math.fsum(one["gave"] for one in some) / len(some)
        half = math.sqrt(math.fsum(((one["high"] - one["low"]) / 2) ** 2 for one in some)) / n
        got = [one["got"] for one in some if one["got"] is not None]
        counts = {key: sum(one[key] for one in some) / n for key in ("rounds", "used", "copies", "unvalued", "refused")}
        reason = next((one["reason"] for one in some if one["reason"]), "")
        rows.append(
            {"client": name, "priority": some[0]["priority"], "gave": gave, "low": gave - half, "high": gave + half,
             "got": math.fsum(got) / len(got) if got else None, **counts, "reason": reason}
        )  # fmt: skip
    return sorted(rows, key=lambda row: (not row["priority"], -row["gave"]))
