"""A client's own account, as a receipt: its totals in a signed line that names the hash of the ledger's last round.

Whoever has an account can check it against the ledger later: it must still have that line, and the rounds up to there
must add up to the same totals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.ledger.account import Account, accounts
from fedalign.ledger.chain import Chain, whole_line, write_line
from fedalign.ledger.signing import Signer, fingerprint, load_public

LARGEST = 1 << 16  #: bytes of an account that a node reads
_REASONS = 10  # that a client is told, the most frequent ones
_OF_THE_LINE = ("ledger", "key", "previous", "hash", "signature")


def own_account(account: Account, last: str, signer: Signer | None, ledger: str = "") -> str:
    """Return a client's totals as a signed line, which names the hash of the ledger's ``last`` round.

    ``ledger`` is the hash of its first line, which tells ledgers apart.
    """
    key = "" if signer is None else signer.public
    return write_line({**_totals(account), "ledger": ledger, "key": key}, last, signer).decode()


def read_account(text: object) -> tuple[dict[str, Any], str] | None:
    """Return an account that a server sent, and who signed it; None if it is none. It never raises.

    >>> read_account(own_account(Account("site-3", False), "0" * 64, None))[1]
    'not signed'
    >>> read_account("no account") is None
    True
    """
    if not isinstance(text, str) or len(text) > LARGEST:
        return None
    row, who = whole_line(text.encode())
    if row is None or not _is_account(row):
        return None
    return row, who


def accounts_in(path: Path) -> list[dict[str, Any]]:
    """Read the accounts in a file: one as a server sent it, or those in the log of a node.

    Raises :class:`FedalignError` if there is none, or if the hash or the signature of one does not hold.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FedalignError(f"cannot read the account {path}: {error}") from error
    found = []
    for line in text.splitlines():
        account = _account_of(line)
        if account is not None:
            read = read_account(account)
            if read is None:
                raise FedalignError(f"{path} has an account that has changed: its hash or its signature does not hold")
            found.append(read[0])
    if not found:
        raise FedalignError(f"{path} has no account; a node's log has one after a run whose server keeps a ledger")
    return found


def account_of_ledger(found: Sequence[Mapping[str, Any]], chains: Sequence[Chain]) -> Mapping[str, Any]:
    """Return the last account that is of one of these ledgers, or else the last one: a log may have other runs'."""
    first = {chain.hashes[0] for chain in chains if chain.texts}
    return next((row for row in reversed(found) if row.get("ledger") in first), found[-1])


def compare_account(row: Mapping[str, Any], chain: Chain) -> str | None:
    """Say in what a ledger differs from an account, as far as the account knows it; None if in nothing."""
    hashes = chain.hashes
    if row["previous"] not in hashes:
        return f"has no line with the hash {row['previous']}, which the account names"
    signed_by = fingerprint(load_public(row["key"])) if row["key"] else None
    if signed_by != chain.signed_by:
        return "was signed with another key than the account"
    totals = accounts(chain.rows[: hashes.index(row["previous"])]).values()
    said = {name: value for name, value in row.items() if name not in _OF_THE_LINE}
    if not any(json.loads(json.dumps(_totals(one))) == said for one in totals):
        return f"has other totals of {row.get('client')!r:.60} than the account"
    return None


def _totals(account: Account) -> dict[str, Any]:
    row = {key: value for key, value in account.as_json().items() if key != "reason"}
    return {"account": 1, **row, "reasons": dict(account.refused.most_common(_REASONS))}


def _account_of(line: str) -> object:
    """Return the text of the account that a line of a file is, or has; None if it has none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    return line if row.get("account") == 1 else row.get("account")


def _is_account(row: Mapping[str, Any]) -> bool:
    def numbers(values: Any) -> bool:
        return all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)

    reasons = row.get("reasons")
    return (
        numbers(row.get(name) for name in ("gave", "low", "high", "used", "rounds", "copies"))
        and (row.get("got") is None or numbers([row["got"]]))
        and isinstance(reasons, dict)
        and numbers(reasons.values())
        and isinstance(row.get("key", ""), str)
    )
