"""Gives all rounds of a history the same clients: over Flower, some join while a run goes on."""

from __future__ import annotations

from dataclasses import replace

from fedalign.protocol.records import ClientRound, History, RoundRecord


def with_same_clients(history: History) -> History:
    """Add absent clients to the rounds before they joined; a history whose rounds have the same clients stays as it is.

    A client has its number for the whole run, and those who join come last.
    """
    most = max((record.clients for record in history.rounds), key=len, default=())
    if all(len(record.clients) == len(most) for record in history.rounds):
        return history
    return History([_completed(record, most) for record in history.rounds])


def _completed(record: RoundRecord, everyone: tuple[ClientRound, ...]) -> RoundRecord:
    later = everyone[len(record.clients) :]
    absent = (
        ClientRound(client.id, client.name, client.priority, False, None, None, "absent", 0.0, "it had not joined yet")
        for client in later
    )
    return replace(record, clients=(*record.clients, *absent))
