"""The status of a run in sentences and table rows, for the terminal and the page."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from fedalign.monitoring.status import ALIVE, ClientStatus, Status

HEADINGS = ("client", "role", "connected", "last seen", "round", "decision", "samples", "loss", "weight", "reason")
_MOST_NAMED = 5  # clients that a sentence names one by one
_PURPOSES = {"hello": "the sample counts", "training": "the updates", "comparison": "the comparisons"}


def sentences(status: Status, now: float, folder: str) -> list[str]:
    """Say where a run stands, the most important first; ``folder`` is told where it has to be continued."""
    said = [_state(status, now, folder)]
    if (wait := status.waiting_for) is not None and status.state_at(now) == "running":
        said.append(f"It waits for {_purpose(wait.what)} of {names(wait.clients)}, for {duration(now - wait.since)}.")
    quorum = status.quorum
    missing = f"; missing: {names(quorum.missing)}" if quorum.missing else ""
    is_, when = ("is", "") if status.state_at(now) in ALIVE else ("was", " when the server last looked")
    parts = f"{quorum.present:g} of the priority clients' weight {is_} connected{when}, {quorum.needed:g} is needed"
    said.append(f"Quorum: {parts}{missing}.")
    if status.last_round is not None and status.round_seconds is not None:
        parts = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in status.waited.items())
        waited = f", of which it waited for clients: {parts}" if parts else ""
        said.append(
            f"The last round ended {ago(status.last_round, now)} and took {status.round_seconds:.1f} s{waited}."
        )
    return [printable(sentence) for sentence in said]


def _state(status: Status, now: float, folder: str) -> str:
    state, done = status.state_at(now), f"{status.round} of {status.rounds} rounds"
    resume = f"continue: flwr run … --run-config 'resume=\"{folder}\"'"
    if state == "dead":
        return (
            f"The server has ended without a word: process {status.pid} on {status.host} gave its last sign of life "
            f"{ago(status.heartbeat, now)}, after {done}; nothing is lost; {resume}"
        )
    if state == "waiting":
        wait = status.waiting_for
        since = "" if wait is None else f", for {duration(now - wait.since)}"
        return f"Waiting for the priority clients' quorum{since}: {names(status.quorum.missing)}; {done} are done."
    if state in ("paused", "failed"):
        note = status.note if status.note.startswith(state) else f"{state} after {done}: {status.note}"
        return note[:1].upper() + note[1:] + ("" if "resume=" in note else f"; {resume}")
    if state == "stopped":
        return f"Ended early, after {done}: {status.note}."
    if state == "finished":
        return f"Finished: {done}, {ago(status.heartbeat, now)}."
    if status.round >= status.rounds > 0:
        return f"{state.capitalize()}: all {done} are done; the last measures and the report are under way."
    repeated = f" {status.note} (attempt {status.attempts + 1})." if status.attempts else ""
    since = "" if status.round_began is None else f", which began {ago(status.round_began, now)}"
    return f"{state.capitalize()}: {done} are done; now round {status.round}{since}.{repeated}"


def client_row(client: ClientStatus, now: float) -> list[str]:
    """Return a client's row of the table with the columns :data:`HEADINGS`."""
    cells = [
        client.name,
        "priority" if client.priority else "free",
        "yes" if client.connected else "no",
        "–" if client.last_seen is None else ago(client.last_seen, now, short=True),
        "–" if client.round is None else str(client.round),
        client.decision or "–",
        "–" if client.samples is None else f"{client.samples:,}",
        "–" if client.loss is None else f"{client.loss:.4g}",
        "–" if client.weight is None else f"{client.weight:.3g}",
        client.reason or "–",
    ]
    return [printable(cell) for cell in cells]


def names(clients: Sequence[str]) -> str:
    """Name clients, a few of them if there are many.

    >>> names(["a", "b"]), names([f"site-{k}" for k in range(9)]), names([])
    ('a, b', 'site-0, site-1, site-2, site-3, site-4 and 4 more', 'nobody')
    """
    shown = ", ".join(clients[:_MOST_NAMED]) or "nobody"
    return shown + (f" and {len(clients) - _MOST_NAMED} more" if len(clients) > _MOST_NAMED else "")


def duration(seconds: float, *, short: bool = False) -> str:
    """Write a time span as a reader says it, in its two largest units or, if it is to be ``short``, in one.

    >>> duration(3.2), duration(75), duration(7300), duration(200_000), duration(75, short=True)
    ('3 s', '1 min 15 s', '2 h 1 min', '2 d 7 h', '1 min')
    """
    whole = max(0, int(seconds))
    for size, large, part, small in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {large}" + ("" if short else f" {whole % size // part} {small}")
    return f"{whole} s"


def ago(then: float, now: float, *, short: bool = False) -> str:
    """Write how long ago something was.

    >>> ago(100.0, 190.0)
    '1 min 30 s ago'
    """
    return f"{duration(now - then, short=short)} ago"


def printable(text: str) -> str:
    r"""Replace characters that a terminal obeys or that change how text is read; strangers write reasons and names.

    >>> printable("a\x1b[2Jb\u202ec")
    'a?[2Jb?c'
    """
    return "".join("?" if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") else letter for letter in text)


def _purpose(what: str) -> str:
    return _PURPOSES.get(what, f"the measures ({what})")
