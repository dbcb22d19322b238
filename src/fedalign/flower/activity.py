"""When the server last saw each client, and whose answers it waits for now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True)
class Waiting:
    """What the server waits for: a purpose, such as ``training``, who has not answered, and since when."""

    purpose: str
    clients: tuple[int, ...]
    since: float


class Activity:
    """Notes of the exchanges with clients. The server writes them; the thread that writes ``status.json`` reads them.

    >>> activity = Activity(clock=lambda: 100.0)
    >>> activity.asked("training", [0, 1])
    >>> activity.answered(1)
    >>> activity.waiting()
    Waiting(purpose='training', clients=(0,), since=100.0)
    >>> activity.last_seen(1), activity.last_seen(0)
    (100.0, None)
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._lock = clock, Lock()
        self._seen: dict[int, float] = {}
        self._purpose, self._since = "", 0.0
        self._open: dict[int, None] = {}
        self.on_question: Callable[[], None] = lambda: None  #: called when the server begins to wait for answers

    def seen(self, clients: Iterable[int]) -> None:
        """Note that clients are connected, or have answered."""
        with self._lock:
            self._seen |= dict.fromkeys(clients, self._clock())

    def asked(self, purpose: str, clients: Iterable[int]) -> None:
        """Note that the server waits for answers."""
        with self._lock:
            self._purpose, self._since, self._open = purpose, self._clock(), dict.fromkeys(clients)
        self.on_question()

    def answered(self, client: int, *, seen: bool = True) -> None:
        """Note an answer; one that Flower gave in the client's place does not say that the client was seen."""
        with self._lock:
            if seen:
                self._seen[client] = self._clock()
            self._open.pop(client, None)

    def ended(self) -> None:
        """Note that the server waits for no answer any more."""
        with self._lock:
            self._open = {}

    def last_seen(self, client: int) -> float | None:
        """Return when a client was last connected or answered, in seconds since 1970; None: not in this process."""
        with self._lock:
            return self._seen.get(client)

    def waiting(self) -> Waiting | None:
        """Return what the server waits for, or None."""
        with self._lock:
            return Waiting(self._purpose, tuple(self._open), self._since) if self._open else None
