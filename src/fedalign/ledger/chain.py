"""``ledger.jsonl``: lines that each hold the hash of the one before, so that a changed line is found.

A line is a JSON object that ends with ``previous``, the hash of the line before, ``hash``, the SHA-256 of all that
stands before it in the line, and, where there is a key, ``signature``, of the hash. There is one way to write an object
as a line, so nothing can stand in a line that its hash does not cover. The first line says what the ledger is about and
with which key it is signed. The last one, the *closing line*, is written when the run ends: lines that were cut off
at the end are missed without it alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.ledger.line_form import CLOSED, first_line_fault, round_fault
from fedalign.ledger.signing import Signer, fingerprint, holds, load_public

NAME = "ledger.jsonl"
START = "0" * 64  #: the hash before the first line
_OUTSIDE = ("hash", "signature")  # what a line's hash does not cover


@dataclass(frozen=True)
class Broken:
    """The first line that does not hold, counted from 1, and why."""

    line: int
    why: str

    def __str__(self) -> str:
        return f"line {self.line} {self.why}"


@dataclass(frozen=True)
class Chain:
    """The lines of a ledger as far as they hold: ``rows`` are the rounds, ``about`` is the first line.

    ``texts`` are the first line and the rounds as they are written. ``closed`` says whether the closing line is there.
    ``broken`` says where the chain breaks; ``signed_by`` is the fingerprint of the key, None if it is not signed.
    """

    about: Mapping[str, Any]
    rows: tuple[dict[str, Any], ...] = ()
    texts: tuple[bytes, ...] = ()
    broken: Broken | None = None
    signed_by: str | None = None
    closed: bool = False

    @property
    def hashes(self) -> list[str]:
        """The hashes of the first line and of all rounds that hold."""
        return [str(json.loads(text)["hash"]) for text in self.texts]

    @property
    def last(self) -> str:
        """The hash of the last round that holds, or of the first line; that of a closing line is no part of it."""
        return str(json.loads(self.texts[-1])["hash"]) if self.texts else START


def write_line(row: Mapping[str, Any], previous: str, signer: Signer | None = None) -> bytes:
    """Return a line of a ledger, without its end.

    >>> json.loads(write_line({"round": 0}, START))["hash"][:8]
    '2a5181df'
    """
    line = {**row, "previous": previous}
    line["hash"] = _digest(line)
    if signer is not None:
        line["signature"] = signer.sign(line["hash"])
    return _written(line)


def read_chain(path: Path, key: str | None = None) -> Chain:
    """Read a ledger and check every line; ``key`` is the public key, or the certificate, that must have signed it.

    Without one, the key of the first line is taken. Raises :class:`FedalignError` if there is no ledger.
    """
    if not path.is_file():
        raise FedalignError(f"{path.parent} has no {NAME}: its run kept no ledger; add [ledger] to its settings")
    about: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    texts: list[bytes] = []
    public = None if key is None else load_public(key)
    *whole, rest = _bytes(path).split(b"\n")
    previous, broken, closed = START, None, False
    for number, text in enumerate([*whole, rest] if rest else whole, start=1):
        row = _read(text)
        if row is None:
            broken = Broken(number, "is damaged: it is no line of a ledger")
            break
        if number == 1:
            about = row
            if public is None and row.get("key"):
                public = _public(row["key"])
        why = _wrong(row, text, previous)
        if why is None and not _signature_holds(row, public):
            why = "has changed, or another key has signed it: its signature does not hold"
        if why is None and closed:
            why = "was added: the line before closes the ledger"
        why = why or _out_of_place(row, number)
        if why is None and number > len(whole):
            why = "was cut short: its end is missing"
        if why is not None:
            broken = Broken(number, why)
            break
        previous, closed = row["hash"], number > 1 and CLOSED in row
        if not closed:
            texts.append(text)
        if number > 1 and not closed:
            rows.append(row)
    if not texts and broken is None:
        broken = Broken(1, "is missing: the ledger is empty")
    signed_by = None if public is None else fingerprint(public)
    return Chain(about, tuple(rows), tuple(texts), broken, signed_by, closed and broken is None)


def closing_line(rounds: int, previous: str, signer: Signer | None = None) -> bytes:
    """Return the line that says after how many rounds a run ended, without its end."""
    return write_line({CLOSED: rounds}, previous, signer)


def whole_line(text: bytes) -> tuple[dict[str, Any] | None, str]:
    """Read a line that stands alone, and say who signed it; None if its hash or its signature does not hold.

    >>> whole_line(write_line({"gave": 1.5}, START))[1], whole_line(b"{}")
    ('not signed', (None, 'changed'))
    """
    row = _read(text)
    if row is None or _wrong(row, text, row["previous"]) is not None:
        return None, "changed"
    public = _public(row["key"]) if row.get("key") else None
    if (row.get("key") and public is None) or not _signature_holds(row, public):
        return None, "changed"
    return row, "not signed" if public is None else f"signed by the key {fingerprint(public)}"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FedalignError(f"cannot read {path}: {error.strerror}") from error


def _out_of_place(row: Mapping[str, Any], number: int) -> str | None:
    """Say why a line whose hash holds cannot stand where it does, or is no line of a ledger at all."""
    if number == 1:
        unknown = bool(row.get("key")) and _public(row["key"]) is None
        return first_line_fault(row) or ("names a key that cannot be read" if unknown else None)
    if CLOSED in row:
        rounds = number - 2
        return None if row[CLOSED] == rounds else f"closes the ledger after {row[CLOSED]!r:.20} rounds, not {rounds}"
    fault = round_fault(row)
    if fault is None and row["round"] != number - 2:
        fault = f"is out of order: it is about round {row['round']}"
    return fault


def _read(text: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    valid = isinstance(row, dict) and all(isinstance(row.get(name), str) for name in ("previous", "hash"))
    return row if valid else None


def _written(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False, separators=(",", ":")).encode()


def _digest(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(_written({name: row[name] for name in row if name not in _OUTSIDE})[:-1]).hexdigest()


def _wrong(row: Mapping[str, Any], text: bytes, previous: str) -> str | None:
    last = [name for name in _OUTSIDE if name in row]
    try:
        # Text that reads as the same object (a repeated key, a space, an escaped letter) is a change as well.
        unchanged = list(row)[-len(last) :] == last and _written(row) == text and _digest(row) == row["hash"]
    except (ValueError, RecursionError):  # NaN, or objects nested too deeply: nothing that is ever written
        unchanged = False
    if not unchanged:
        return "has changed: its hash is another one"
    if row["previous"] != previous:
        return "does not follow the line before: lines were changed, removed or added there"
    return None


def _signature_holds(row: Mapping[str, Any], public: Any) -> bool:
    """Say whether a line is signed with a key, or not signed at all where there is no key."""
    if public is None:
        return "signature" not in row
    signature = row.get("signature")
    return isinstance(signature, str) and holds(public, row["hash"], signature)


def _public(text: object) -> Any:
    try:
        return load_public(str(text))
    except FedalignError:
        return None  # the first line has changed, and its hash says so
