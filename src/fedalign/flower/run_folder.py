"""The folder of a run over Flower: it is begun, or a run in it is continued from its last checkpoint."""

from __future__ import annotations

import logging
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import tomli_w

from fedalign.callbacks import Stopped
from fedalign.errors import FedalignError
from fedalign.experiments.durable_files import write_durably
from fedalign.experiments.store import RunStore
from fedalign.flower.audit import AuditLog
from fedalign.flower.settings import Settings
from fedalign.protocol.messages import Snapshot
from fedalign.protocol.records import RoundRecord

log = logging.getLogger("flwr")
_ONCE = {"resume", "continue_stopped", "out"}  # say how to continue, and are no part of the run
_MAY_CHANGE = _ONCE | {
    "timeout", "free_timeout", "free_part", "grace", "refresh", "wait", "repeats", "quorum", "device", "roster",
    "trackers", "track", "deliver", "compress", "cache",
}  # fmt: skip


@dataclass(frozen=True)
class Opened:
    """Where a run begins or goes on: the snapshot, the record of the round before, and why it had stopped, if so."""

    snapshot: Snapshot
    last: RoundRecord | None = None
    stopped: Stopped | None = None


def open_run(store: RunStore, settings: Settings, first: Snapshot, audit: AuditLog) -> Opened:
    """Begin a run in a new folder, or continue the one to resume. ``first`` is the snapshot of a run that begins.

    Raises :class:`FedalignError` for a folder that holds another run, none, or one with other settings.
    """
    folder, config = store.folder, store.folder / "config.toml"
    if not settings.resume:
        if not store.is_empty() or config.exists():
            raise FedalignError(f'{folder} already holds a run; continue it with resume="{folder}"')
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(config, tomli_w.dumps(settings.as_table()))
        audit.add("run_started", rounds=settings.rounds, rule=settings.arm_name, trust=settings.trust)
        return Opened(first)
    if not config.exists():
        raise FedalignError(f"{folder} holds no run to resume")
    changed = _changed(config, settings)
    opened = _continued(store, settings, first)
    sizes = [len(snapshot.tensors["model"]) for snapshot in (opened.snapshot, first)]
    if sizes[0] != sizes[1]:  # a run of an earlier version has no identity.json, which says more
        raise FedalignError(f"{folder} was run with another model: it had {sizes[0]} numbers, this one has {sizes[1]}")
    if "rounds" in changed:
        table = tomllib.loads(config.read_text(encoding="utf-8")) | {"rounds": settings.rounds}
        write_durably(config, tomli_w.dumps(table))
    audit.round = opened.snapshot.round
    audit.add("run_resumed", rounds_done=opened.snapshot.round)
    if changed:
        audit.add("settings_changed", **changed)
    return opened


def _continued(store: RunStore, settings: Settings, first: Snapshot) -> Opened:
    points, notes = store.checkpoints()
    for note in notes:
        log.warning(note)
    if not points:
        store.rewind(None)
        return Opened(first)
    at = points[0]
    store.rewind(at)
    stopped = store.stopped()
    if settings.continue_stopped or (stopped is not None and stopped.round + 1 != at.rounds):
        store.mark_stopped(None)
        stopped = None
    elif stopped is not None:
        log.warning("%s; continue it nevertheless with continue-stopped=true", stopped)
    log.info("continuing from round %d", at.rounds)
    return Opened(at.snapshot, at.last, stopped)


def _changed(config: Path, settings: Settings) -> dict[str, list[Any]]:
    """Return the settings that are others now, each with its old and its new value; refuse those that must not be."""
    # A run of an earlier version has the defaults of settings that are newer; but it believed what clients reported.
    usual = {field.name: field.default for field in fields(Settings) if field.default is not MISSING}
    try:
        table = tomllib.loads(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise FedalignError(f"cannot read {config}, so the run cannot be continued: {error}") from error
    if not table:
        raise FedalignError(f"{config} is empty, so the run cannot be continued; put its settings back")
    old = usual | {"trust": "report"} | table
    changed = {k: [old.get(k), v] for k, v in sorted(settings.as_table().items()) if k not in _ONCE and old.get(k) != v}
    longer = {"rounds"} if settings.rounds > old.get("rounds", 0) else set()
    refused = {k: values for k, values in changed.items() if k not in _MAY_CHANGE | longer}
    if refused:
        shown = "; ".join(f"{k} was {was!r}, is {now!r}" for k, (was, now) in refused.items())
        raise FedalignError(f"{config.parent} was run with other settings: {shown}")
    return changed
