"""``status.json``: where a run over Flower stands, and what is known about its clients."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cattrs

from fedalign.errors import FedalignError

NAME = "status.json"  #: the file in the run's folder
ALIVE = ("starting", "waiting", "running")  #: the states of a server that is at work
STATES = (*ALIVE, "paused", "stopped", "finished", "failed", "dead")  #: ``dead`` is told by the heartbeat alone


@dataclass(frozen=True)
class ClientStatus:
    """One client: its role, when it was last seen, and the last decision about it with the reason.

    ``round`` is the round of that decision; times are seconds since 1970. None: not known.
    """

    id: int
    name: str
    priority: bool
    samples: int | None = None
    connected: bool = False
    last_seen: float | None = None
    round: int | None = None
    decision: str | None = None
    reason: str = ""
    loss: float | None = None
    accuracy: float | None = None
    weight: float | None = None


@dataclass(frozen=True)
class Quorum:
    """The part of the priority clients' weight that is needed, the part that is connected, and who is missing."""

    needed: float
    present: float
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class WaitingFor:
    """What the server waits for: ``quorum``, or the answers to a question such as ``training``, and from whom."""

    what: str
    clients: tuple[str, ...]
    since: float


@dataclass(frozen=True)
class Status:
    """Where a run stands. ``heartbeat`` is when the server last wrote it, which it does every ``interval`` seconds.

    ``round`` counts the rounds that are done. ``note`` is why the run paused, failed or stopped, or why a round is
    repeated.
    """

    state: str
    round: int
    rounds: int
    rule: str
    run: str
    started: float
    heartbeat: float
    interval: float
    quorum: Quorum
    note: str = ""
    waiting_for: WaitingFor | None = None
    round_began: float | None = None
    last_round: float | None = None
    round_seconds: float | None = None
    waited: dict[str, float] = field(default_factory=dict)
    attempts: int = 0
    pid: int | None = None
    host: str = ""
    version: str = ""
    clients: tuple[ClientStatus, ...] = ()

    def is_late(self, now: float) -> bool:
        """Say whether a server that should be at work has missed several heartbeats."""
        return self.state in ALIVE and now - self.heartbeat > 5 * self.interval

    def state_at(self, now: float) -> str:
        """Return the state: ``dead`` if the server should be at work and gives no sign of life.

        >>> status = Status("running", 3, 50, "fedalign", "1", 0.0, 100.0, 3.0, Quorum(1.0, 1.0))
        >>> status.state_at(110.0), status.state_at(120.0)
        ('running', 'dead')
        """
        return "dead" if self.is_late(now) else self.state

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it; a number that is not finite becomes None."""
        return {key: _plain(value) for key, value in asdict(self).items()}

    def as_seen(self, now: float) -> str:
        """Return it as JSON with the state as it is now, and with the heartbeat's age in seconds."""
        known = self.to_dict() | {"state": self.state_at(now), "heartbeat_age": round(now - self.heartbeat, 3)}
        return json.dumps(known, indent=1, allow_nan=False) + "\n"

    def to_json(self) -> str:
        """Return it as the text of ``status.json``."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"


def read_status(folder: Path) -> Status:
    """Read the status of a run over Flower.

    Raises :class:`FedalignError` if the folder holds no such run, or if the file is damaged.
    """
    path = folder / NAME
    try:
        return cattrs.structure(json.loads(path.read_text(encoding="utf-8")), Status)
    except FileNotFoundError as error:
        if not folder.is_dir():
            raise FedalignError(
                f"there is no folder {folder}; give the run's output folder, its setting out"
            ) from error
        if not (folder / "config.toml").is_file():
            raise FedalignError(f"{folder} is not a run's folder: it has no config.toml") from error
        raise FedalignError(
            f"{folder} has no {NAME}: only runs over Flower have one, and not those of earlier versions"
        ) from error
    except (OSError, ValueError, cattrs.BaseValidationError) as error:
        raise FedalignError(f"{path} cannot be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
