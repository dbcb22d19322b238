"""The ledgers of a run in its report: a table for each arm, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedalign.errors import FedalignError
from fedalign.ledger.account import accounts, mean_accounts
from fedalign.ledger.chain import Chain
from fedalign.ledger.folder import read_ledgers
from fedalign.report.client_data import client_names
from fedalign.report.read_runs import RunFolder

TITLE = "Who gave, who got? The contribution ledger"
HEADINGS = ("client", "role", "gave", "95 % interval", "got", "rounds used", "rounds refused", "most frequent reason")
NOTE = (
    "Gave: by how much the client's updates lowered the priority clients' held-out loss, summed over rounds, as the "
    "priority clients measured it. Below 0, they did harm. Got: by how much the client's own loss of the model that it "
    "receives fell; a free client reports it itself. Both are means over seeds. A client's name leads to its page."
)


def ledger_tables(run: RunFolder, number: int) -> dict[str, Any] | None:
    """Return the tables of a run, whose place on the page is ``number``; None if it kept no ledger."""
    chains = _chains(run)
    if not chains:
        return None
    names = {one["name"]: one["id"] for one in client_names(run)}
    tables = [
        {
            "arm": arm,
            "rows": [
                {"link": f"#client={names[row['client']]}&run={number}&arm={arm}", "cells": _cells(row)}
                for row in totals(own)
                if row["client"] in names
            ],
        }
        for arm, own in chains.items()
    ]
    broken = [f"{arm}: {one.broken}" for arm, own in chains.items() for one in own if one.broken is not None]
    keys = sorted({one.signed_by for own in chains.values() for one in own if one.signed_by})
    signed = f"Signed by the key {', '.join(keys)}." if keys else "It is not signed."
    return {"title": TITLE, "headings": HEADINGS, "tables": tables, "note": NOTE, "broken": broken, "signed": signed}


def rounds_and_totals(run: RunFolder) -> dict[str, tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]]]]:
    """Return the totals of every arm with a ledger, and the rounds of its first seed, for a picture."""
    found = {arm: (totals(own), own[0].rows) for arm, own in _chains(run).items()}
    return {arm: (rows, rounds) for arm, (rows, rounds) in found.items() if rows}


def totals(chains: Sequence[Chain]) -> list[dict[str, Any]]:
    """Average what clients gave and got over the seeds of an arm."""
    return mean_accounts([accounts(one.rows) for one in chains])


def _chains(run: RunFolder) -> dict[str, list[Chain]]:
    try:
        ledgers = read_ledgers(run.folder)
    except FedalignError:  # it kept none
        return {}
    arms = list(run.histories)
    found: dict[str, list[Chain]] = {}
    for (arm, _), (path, chain) in ledgers.items():
        found.setdefault(arms[0] if path.parent == run.folder else arm, []).append(chain)
    return {arm: found[arm] for arm in arms if arm in found}


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["client"],
        "priority" if row["priority"] else "free",
        f"{row['gave']:+.3g}",
        f"{row['low']:+.3g} to {row['high']:+.3g}",
        "–" if row["got"] is None else f"{row['got']:+.3g}",
        f"{row['used']:g} of {row['rounds']:g}",
        f"{row['refused']:g}",
        row["reason"],
    ]
