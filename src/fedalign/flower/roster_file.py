"""The roster file: it gives every node, identified by its public key, a name and a role. Nodes cannot change theirs.

A roster is TOML::

    unknown = "refuse"            # or "free": nodes with other keys take part as free clients

    [[client]]
    key = "5f1c…"                 # SHA-256 of the node's public key
    name = "site-3"
    priority = true
    samples = 5000                # count at most this many of its samples
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
from cryptography.hazmat.primitives import serialization

from fedalign.errors import FedalignError, nearest
from fedalign.experiments.store import write_atomically
from fedalign.monitoring.words import printable
from fedalign.settings.typed_values import check_type
from fedalign.settings.validation import options_of


@dataclass(frozen=True)
class Entry:
    """A client of the roster: its key's fingerprint, its name and its role. ``samples`` caps its sample count.

    ``model`` says whether it may have the final model, whatever the setting ``deliver`` says.
    """

    key: str
    name: str
    priority: bool = False
    samples: int | None = None
    model: bool | None = None


@dataclass(frozen=True)
class RosterFile:
    """The clients of a federation, and what happens to nodes with unknown keys. Keys and names must be unique."""

    entries: tuple[Entry, ...]
    unknown: Literal["refuse", "free"] = "refuse"

    def __post_init__(self) -> None:
        if self.unknown not in ("refuse", "free"):
            raise FedalignError(f"the roster's unknown must be 'refuse' or 'free', not {self.unknown!r}")
        for what in ("key", "name"):
            values = [getattr(entry, what) for entry in self.entries]
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise FedalignError(f"the roster has two clients with the {what} {twice[0]!r}")

    @classmethod
    def read(cls, path: Path) -> RosterFile:
        """Read a roster; a :class:`FedalignError` says what is wrong with the file."""
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise FedalignError(f"there is no roster {path}; make one with fedalign flower roster add") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise FedalignError(f"cannot read the roster {path}: {error}") from error
        rest = {key: value for key, value in table.items() if key not in ("client", "unknown")}
        if rest:
            raise FedalignError(f"{path} has an unknown key {next(iter(rest))!r}; {nearest(next(iter(rest)), _TOP)}")
        clients = table.get("client", [])
        if not isinstance(clients, list):
            raise FedalignError(f"in {path}, clients are [[client]] tables")
        return cls(tuple(_entry(client, path) for client in clients), table.get("unknown", "refuse"))

    def write(self, path: Path) -> None:
        """Write the roster, so that a reader finds the old file or the new one and never a part."""
        clients = [{k: v for k, v in vars(entry).items() if v is not None} for entry in self.entries]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, tomli_w.dumps({"unknown": self.unknown, "client": clients}))

    def adding(self, entry: Entry, replace: bool = False) -> RosterFile:
        """Return a roster with one more client, or with new settings for a key that it has.

        With ``replace`` it takes the place of the client with the same name, whose key is another one.
        """
        if entry.samples is not None and entry.samples < 1:
            raise FedalignError(f"{entry.name}'s samples must be at least 1, not {entry.samples}")
        _check_name(entry.name)
        others = [one for one in self.entries if one.name != entry.name or one.key == entry.key]
        if len(others) < len(self.entries) and not replace:
            raise FedalignError(
                f"the roster has a client {entry.name!r} with another key; --replace gives it the new one"
            )
        kept = {one.key: one for one in others} | {entry.key: entry}
        return RosterFile(tuple(kept.values()), self.unknown)

    def removing(self, client: str) -> RosterFile:
        """Return a roster without a client, given its name or its key's fingerprint.

        >>> RosterFile((Entry("a" * 64, "site-1"), Entry("b" * 64, "site-2"))).removing("site-1").entries[0].name
        'site-2'
        """
        kept = tuple(entry for entry in self.entries if client not in (entry.name, entry.key))
        if len(kept) == len(self.entries):
            names = [entry.name for entry in self.entries]
            raise FedalignError(f"the roster has no client {client!r}; {nearest(client, names)}")
        return RosterFile(kept, self.unknown)

    def who(self, fingerprints: Mapping[int, str]) -> dict[int, Entry]:
        """Return the entries of nodes, given their keys' fingerprints; unknown nodes are left out, or free clients."""
        known = {entry.key: entry for entry in self.entries}
        found = {}
        for node, digest in fingerprints.items():
            if digest in known:
                found[node] = known[digest]
            elif self.unknown == "free":
                found[node] = stranger(digest)
        return found


_TOP = ("client", "unknown")


def stranger(key: str) -> Entry:
    """Return the entry of a node whose key the roster does not have, where strangers take part."""
    return Entry(key, f"node-{key[:8]}")


def _entry(table: Any, path: Path) -> Entry:
    if not isinstance(table, dict):
        raise FedalignError(f"in {path}, a client is a [[client]] table")
    known, checked = options_of(Entry), {}
    for key, value in table.items():
        if key not in known:
            raise FedalignError(f"in {path}, a client has an unknown key {key!r}; {nearest(key, known)}")
        checked[key] = check_type(f"in {path}, a client's {key}", value, known[key].annotation)
    for key in ("key", "name"):
        if key not in table:
            raise FedalignError(f"in {path}, a client has no {key}")
    if len(table["key"]) != 64 or set(table["key"]) - set("0123456789abcdef"):
        raise FedalignError(f"in {path}, {table['name']}'s key is not a SHA-256 in hexadecimal: {table['key']!r}")
    _check_name(table["name"])
    entry = Entry(**checked)
    if entry.samples is not None and entry.samples < 1:
        raise FedalignError(f"in {path}, {entry.name}'s samples must be at least 1, not {entry.samples}")
    return entry


def _check_name(name: str) -> None:
    if not name.strip() or printable(name) != name:
        raise FedalignError(f"a client's name must be a text without control characters, not {name!r}")


def fingerprint(key: bytes) -> str:
    """Return the SHA-256 of a public key, in the OpenSSH or the PEM format; both formats give the same.

    Raises :class:`FedalignError` for bytes that are no key: a stranger's node may have sent them.
    """
    load = (
        serialization.load_ssh_public_key if key.startswith((b"ecdsa-", b"ssh-")) else serialization.load_pem_public_key
    )
    try:
        plain = load(key).public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    except Exception as error:  # the reader raises more than it says, such as NotImplementedError
        raise FedalignError("this is not a public key") from error
    return hashlib.sha256(plain).hexdigest()
