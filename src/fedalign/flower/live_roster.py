"""The roster while a run goes on: edits of the file and strangers take effect between rounds, and are recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from fedalign.errors import FedalignError
from fedalign.flower.members import Members
from fedalign.flower.roster_file import Entry, RosterFile, fingerprint
from fedalign.protocol.roster import Roster

log = logging.getLogger("flwr")
Report = Callable[..., None]  #: gets an event of the audit log, a client's name and details


class LiveRoster:
    """Reads the roster file again when it has changed. A damaged edit is reported, and the former roster stays.

    ``check`` raises :class:`FedalignError` if the run cannot go on with a roster.
    """

    def __init__(self, path: Path, file: RosterFile, members: Members, check: Callable[[Roster], None]) -> None:
        self._path, self._file, self._members, self._check = path, file, members, check
        self._state = _state(path)
        self._no_keys: set[int] = set()  # connected nodes whose public key cannot be read
        self.report: Report = lambda event, client=None, **details: None

    def connected(self, keys: Mapping[int, bytes]) -> dict[int, int]:
        """Return the client of every node that takes part, given the nodes' public keys; strangers become clients."""
        self._read_again()
        found = {}
        for node, entry in sorted(self._file.who(self._fingerprints(keys)).items(), key=lambda one: one[1].key):
            if self._members.number(entry) is None:
                self._members.add(entry)
                self.report("client_joined", entry.name, key=entry.key)
                log.info("%s, which the roster does not name, takes part as a free client", entry.name)
            k = self._members.number(entry)
            assert k is not None
            found[node] = k
        return found

    def _fingerprints(self, keys: Mapping[int, bytes]) -> dict[int, str]:
        """Return the fingerprints of nodes' keys.

        A SuperLink that does not authenticate nodes takes anything for a key. A node with something else takes no part,
        and is reported once.
        """
        self._no_keys &= keys.keys()
        found = {}
        for node, key in keys.items():
            try:
                found[node] = fingerprint(key)
            except FedalignError as error:
                if node not in self._no_keys:
                    log.warning("node %d takes no part: %s", node, error)
                self._no_keys.add(node)
        return found

    def _read_again(self) -> None:
        state = _state(self._path)
        if state == self._state:
            return
        self._state = state
        try:
            edited = RosterFile.read(self._path)
            self._take_over(edited)
        except FedalignError as error:
            log.warning("the roster was edited, and the edit is not taken over: %s", error)
            self.report("roster_damaged", reason=str(error))

    def _take_over(self, edited: RosterFile) -> None:
        """Change the clients as an edited roster says, or raise :class:`FedalignError` and change nothing."""
        before = {entry.key: entry for entry in self._file.entries}
        after = {entry.key: entry for entry in edited.entries}
        strangers = [
            entry
            for k, entry in enumerate(self._members.entries)
            if not self._members.is_removed(k) and entry.key not in before and entry.key not in after
        ]
        entries = [*edited.entries, *(strangers if edited.unknown == "free" else [])]
        trial = Members(self._members.entries, free_cap=1.0)
        trial.edit(entries)
        self._check(trial.roster())
        self._members.edit(entries)
        changes = roster_changes(before, after)
        if edited.unknown != self._file.unknown:
            changes.append(("roster_edited", None, {"unknown": [self._file.unknown, edited.unknown]}))
        self._file = edited
        for event, client, details in changes:
            log.info("the roster was edited: %s %s %s", event, client or "", details)
            self.report(event, client, **details)


Change = tuple[str, str | None, dict[str, object]]


def roster_changes(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> list[Change]:
    """Return what an edit changed, as events of the audit log with the client's name and details.

    >>> was, now = Entry("aa", "site-1"), Entry("aa", "site-1", priority=True)
    >>> roster_changes({"aa": was}, {"aa": now})
    [('role_changed', 'site-1', {'was': 'free', 'now': 'priority'})]
    """
    changes: list[Change] = []
    for key, entry in after.items():
        if key not in before:
            changes.append(("client_added", entry.name, {"key": key, "role": _role(entry)}))
            continue
        old = before[key]
        if old.priority != entry.priority:
            changes.append(("role_changed", entry.name, {"was": _role(old), "now": _role(entry)}))
        others = {
            what: [getattr(old, what), getattr(entry, what)]
            for what in ("name", "samples", "model")
            if getattr(old, what) != getattr(entry, what)
        }
        if others:
            changes.append(("roster_edited", entry.name, dict(others)))
    changes += [("client_removed", before[key].name, {"key": key}) for key in before if key not in after]
    return changes


def _role(entry: Entry) -> str:
    return "priority" if entry.priority else "free"


def _state(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is edited or replaced; None if it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
