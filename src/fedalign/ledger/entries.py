"""What a line of a ledger says about a round. It follows from the records of ``rounds.jsonl``, and can be checked."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any

from fedalign.protocol.ledger_values import ClientValue, RoundValues
from fedalign.protocol.records import ClientRound, RoundRecord

_OF_ROUND = ("loss", "gain", "free_gain", "models", "note")
ROUND_KEYS = ("round", *_OF_ROUND)  #: the keys of a line beside ``clients`` and those of the chain

Losses = MutableMapping[int, float]  #: the last loss of every client, of the model that it received


def round_entry(record: RoundRecord, losses: Losses) -> dict[str, Any]:
    """Return what a ledger says about a round; ``losses`` are brought up to date."""
    values = record.ledger or RoundValues("")
    given, got = {one.id: one for one in values.clients}, falls(record, losses)
    return {
        "round": record.round,
        **{name: getattr(values, name) for name in _OF_ROUND},
        "clients": [_client(client, given.get(client.id), got.get(client.id)) for client in record.clients],
    }


def falls(record: RoundRecord, losses: Losses) -> dict[int, float]:
    """Return by how much each client's loss of the model that it receives fell since it measured it last."""
    found = {}
    for client in record.clients:
        if client.loss is not None and math.isfinite(client.loss):
            if client.id in losses:
                fell = losses[client.id] - client.loss
                if math.isfinite(fell):
                    found[client.id] = fell
            losses[client.id] = client.loss
    return found


def _client(client: ClientRound, value: ClientValue | None, got: float | None) -> dict[str, Any]:
    """Return a client's entry. One whose update entered no model gave nothing."""
    used = client.decision in ("trained", "admitted", "base")
    gave = value or (ClientValue(client.id, None) if used else ClientValue(client.id, 0.0, 0.0, 0.0))
    return {
        "id": client.id,
        "name": client.name,
        "priority": client.priority,
        "decision": client.decision,
        "reason": client.reason,
        "weight": client.weight,
        "gave": gave.gave,
        "low": gave.low,
        "high": gave.high,
        "copies": gave.copies,
        "loss": client.loss if client.loss is not None and math.isfinite(client.loss) else None,
        "got": got,
    }
