"""Tells every client, at the end of a run, its own totals of the ledger: what it gave and got, and why it was refused.

A client is told nothing about others, and its answer is empty: nothing that it says enters its score.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fedalign.flower.audit import AuditLog
from fedalign.flower.exchange import Exchange
from fedalign.flower.members import Members
from fedalign.flower.texts import plain_text
from fedalign.flower.wire import ACCOUNT
from fedalign.ledger.account import accounts
from fedalign.ledger.chain import NAME, read_chain
from fedalign.ledger.ledger import Ledger
from fedalign.ledger.receipt import own_account, read_account
from fedalign.ledger.signing import SERVER_KEY, Signer
from fedalign.protocol.messages import Lost

log = logging.getLogger("flwr")


def servers_signer(ledger: Ledger) -> Signer:
    """Return what signs a server's ledger: the key of the settings, or the server's own, which is made once."""
    return Signer.own(SERVER_KEY.expanduser()) if ledger.key is None else Signer.read(ledger.key)


def send_accounts(folder: Path, signer: Signer, exchange: Exchange, members: Members, audit: AuditLog) -> None:
    """Send every connected client its own account; who has not got it is reported, and nothing else comes of it.

    Totals of a broken ledger are nobody's receipt: then no account is signed, and that is reported.
    """
    chain = read_chain(folder / NAME)
    if chain.broken is not None:
        log.error("no client is sent its account: %s %s", folder / NAME, chain.broken)
        audit.add("accounts_withheld", reason=f"{NAME}: {chain.broken}")
        return
    contents = {
        k: RecordDict(
            {"task": ConfigRecord({"client": k, "account": own_account(one, chain.last, signer, chain.hashes[0])})}
        )
        for k, one in accounts(chain.rows).items()
        if k in exchange.nodes
    }
    for k, answer in exchange(ACCOUNT, contents, "accounts").items():
        if isinstance(answer, Lost):
            log.info("%s has not got its account of the ledger: %s", members.name(k), answer.reason)
        audit.add("account_not_sent" if isinstance(answer, Lost) else "account_sent", members.name(k))


def shown_account(text: object) -> list[str]:
    """Say in words what an account says: what this client gave and got, and why it was refused.

    >>> from fedalign.ledger.account import Account
    >>> shown_account(own_account(Account("site-3", False, rounds=2, used=1, gave=0.5), "0" * 64, None))[0]
    "gave +0.5 (95 %: +0.5 to +0.5): by so much its updates lowered the priority clients' loss; used in 1 of 2 rounds"
    """
    found = read_account(text)
    if found is None:
        return ["the server sent an account that cannot be read"]
    row, who = found
    lines = [
        f"gave {row['gave']:+.4g} (95 %: {row['low']:+.4g} to {row['high']:+.4g}): by so much its updates lowered the "
        f"priority clients' loss; used in {row['used']:g} of {row['rounds']:g} rounds"
    ]
    if row["got"] is not None:
        lines.append(f"got {row['got']:+.4g}: by so much its own loss of the received model fell")
    if row["copies"]:
        lines.append(f"sent a copy of another update in {row['copies']:g} rounds, which is worth nothing of its own")
    lines += [f"not used in {count:g} rounds: {plain_text(reason)}" for reason, count in row["reasons"].items()]
    lines.append(f"the ledger's last round has the hash {row['previous']}")
    return [*lines, f"this account is {who}"]


def as_json(text: object) -> dict[str, Any] | None:
    """Return an account for JSON, with who signed it; None if it cannot be read."""
    found = read_account(text)
    return None if found is None else {**json.loads(str(text)), "signed": found[1]}
