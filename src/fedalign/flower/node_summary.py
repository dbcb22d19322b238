"""A node's own summary: what it was asked in each run, what it did, its losses, and why it declined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedalign.flower.own_accounts import as_json


@dataclass
class RunSummary:
    """What a node's log says of one run. Times are seconds since 1970.

    ``asked`` counts messages by their type and ``declined`` those that were declined, by the reason. ``losses`` are
    this client's own, of the models that it was asked to train, with the round; ``global_losses`` are those of the
    priority clients. ``models`` are the files in which final models were kept. ``account`` is what the server's ledger
    says about this client.
    """

    run: str
    first: float
    last: float = 0.0
    app: str = ""
    asked: Counter[str] = field(default_factory=Counter)
    trained: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    losses: list[tuple[int, float]] = field(default_factory=list)
    global_losses: list[tuple[int, float]] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    account: str = ""  #: the last one that the server sent, as it was sent

    def as_json(self) -> dict[str, Any]:
        """Return the values for JSON."""
        account = as_json(self.account)
        return {**vars(self), "asked": dict(self.asked), "declined": dict(self.declined), "account": account}


def summarize(lines: Iterable[Mapping[str, Any]]) -> list[RunSummary]:
    """Summarize a node's log, run by run, in the order in which the runs began.

    >>> trained = {"run": "7", "time": 10.0, "asked": "train", "round": 0, "loss": 2.0, "trained": True}
    >>> declined = {"run": "7", "time": 20.0, "asked": "train", "round": 1, "trained": False, "reason": "opted out"}
    >>> (run,) = summarize([trained, declined])
    >>> run.trained, dict(run.declined), run.losses
    (1, {'opted out': 1}, [(0, 2.0)])
    """
    runs: dict[str, RunSummary] = {}
    for line in lines:
        run = runs.setdefault(line["run"], RunSummary(line["run"], line["time"]))
        run.last = line["time"]
        asked = line.get("asked", "train")  # the log of an earlier version has nothing else
        if asked == "app":
            run.app = line["app"]
            continue
        run.asked[asked] += 1
        run.trained += bool(line.get("trained"))
        if line.get("reason"):
            run.declined[line["reason"]] += 1
        for key, values in (("loss", run.losses), ("global_loss", run.global_losses)):
            if isinstance(line.get(key), int | float):
                values.append((int(line.get("round", 0)), float(line[key])))
        run.account = str(line.get("account", run.account))
        if "kept" in line:
            kept = line["kept"]
            run.models += kept if isinstance(kept, list) else [kept]  # personal models are several
    return list(runs.values())
