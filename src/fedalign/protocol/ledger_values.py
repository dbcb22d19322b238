"""What clients gave in a round, as the record of the round holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ClientValue:
    """What one client gave: the part of the fall of the priority clients' loss that is due to its update.

    ``low`` and ``high`` are a 95 % interval. All are None where the client could not be valued. ``copies`` says what
    its update is a copy of, if it is one.
    """

    id: int
    gave: float | None
    low: float | None = None
    high: float | None = None
    copies: str = ""


@dataclass(frozen=True)
class RoundValues:
    """What the clients whose updates a round used gave.

    ``loss`` is the priority clients' loss of the model that the round started from, ``gain`` by how much the aggregate
    of all updates, each counted once, lowers it, and ``free_gain`` the part of that beyond the priority clients' own
    aggregate. ``models`` is the number of models that were measured for it. ``note`` says why something was not valued.
    """

    method: str
    loss: float | None = None
    gain: float | None = None
    free_gain: float | None = None
    models: int = 0
    note: str = ""
    clients: tuple[ClientValue, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the values for JSON.

        >>> RoundValues.from_json(RoundValues("exact", clients=(ClientValue(3, 0.5),)).to_json()).clients[0].gave
        0.5
        """
        return {**vars(self), "clients": [dict(vars(one)) for one in self.clients]}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RoundValues:
        """Read the values of a round from a line of ``rounds.jsonl``."""
        return cls(**{**row, "clients": tuple(ClientValue(**one) for one in row["clients"])})
