"""A single run with a folder of its own, as ``simulate(out=…)`` gives it: stored round by round, and resumable."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fedalign.callbacks import Callback, RunInfo
from fedalign.errors import FedalignError
from fedalign.experiments.config_file import check_same, read_settings
from fedalign.experiments.recorder import Recorder
from fedalign.experiments.store import Checkpoint, RunStore, write_atomically
from fedalign.ledger.writer import LedgerWriter
from fedalign.rules.baselines import Alone
from fedalign.simulation.spec import RunSpec
from fedalign.tracking.guard import Guarded
from fedalign.tracking.tracker import Tracker

_DESCRIBED = (
    "rule",
    "rounds",
    "warmup",
    "local",
    "participation",
    "seed",
    "server",
    "aggregator",
    "free_cap",
    "free_total",
)


class FolderRecorder(Recorder):
    """Writes a run into its folder; the folder is made, or cut back to the checkpoint, when the run starts."""

    def __init__(self, store: RunStore, spec: RunSpec, point: Checkpoint | None) -> None:
        super().__init__(store, spec.federation, spec.rounds)
        self._own_store, self._spec, self._point = store, spec, point

    def on_start(self, run: RunInfo) -> None:
        """Make the folder with its ``config.toml``; a resumed run's later rounds are cut off."""
        store = self._own_store
        try:
            store.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(store.folder / "config.toml", tomli_w.dumps(description(self._spec)))
        except OSError as error:
            raise FedalignError(f"cannot write to {store.folder}: {error.strerror}") from error
        store.rewind(self._point)
        if self._spec.stopped is None:
            store.mark_stopped(None)


def in_folder(spec: RunSpec, folder: Path, *, resume: bool = False, continue_stopped: bool = False) -> RunSpec:
    """Give a run a folder: it is recorded there, and with ``resume`` goes on from what is there.

    A run that stopped early stays as it is, unless it is to be continued. Raises :class:`FedalignError` if the folder
    holds a run and ``resume`` is false, if there is none to resume, or if that one had other settings.
    """
    store = RunStore(folder)
    if not resume:
        if continue_stopped:
            raise FedalignError("continue_stopped goes with resume=True: it continues a run that is there")
        if not store.is_empty() or (folder / "config.toml").exists():
            raise FedalignError(f"{folder} already holds a run; continue it with resume=True, or choose another folder")
        point = None
    else:
        if not (folder / "config.toml").exists():
            raise FedalignError(f"{folder} holds no run to resume (there is no config.toml in it)")
        if (message := store.diverged()) is not None:
            raise FedalignError(f"the run in {folder} cannot be resumed: {message}")
        check_same(folder, read_settings(folder), description(spec))
        points, _ = store.checkpoints()
        point = points[0] if points else None
    stopped = None if continue_stopped else store.stopped()
    if point is None or (stopped is not None and stopped.round + 1 != point.rounds):
        stopped = None
    if point is not None:
        past = store.history().rounds[: point.rounds]
        spec = dataclasses.replace(spec, snapshot=point.snapshot, last=point.last, past=past, stopped=stopped)
    recorder = FolderRecorder(store, spec, point)
    ledger = [] if spec.ledger is None or isinstance(spec.rule, Alone) else [LedgerWriter(spec.ledger)]
    return dataclasses.replace(spec, folder=folder, callbacks=[*spec.callbacks, *ledger, recorder])


def with_trackers(spec: RunSpec, trackers: Sequence[Callback]) -> RunSpec:
    """Add trackers to a run, after its other callbacks; the run goes on if one fails."""
    own = [Guarded(one, _name(one)) if isinstance(one, Tracker) else one for one in spec.callbacks]
    more = [Guarded(one, _name(one)) for one in trackers]
    return dataclasses.replace(spec, callbacks=[*own, *more])


def description(spec: RunSpec) -> dict[str, Any]:
    """Describe a run in words that TOML holds, to compare it with one that continues it."""
    found: dict[str, Any] = {name: _in_words(getattr(spec, name)) for name in _DESCRIBED}
    found["clients"] = list(spec.federation.roster.names)
    found["samples"] = list(spec.federation.roster.samples)
    found["metrics"] = list(spec.metrics)
    if spec.personal:
        found["personal"] = [_in_words(method) for method in spec.personal.values()]
    if spec.ledger is not None:
        found["ledger"] = _in_words(spec.ledger)
    return found


def _in_words(value: Any) -> Any:
    if isinstance(value, int | float | str):
        return value
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # an address differs between processes


def _name(tracker: Callback) -> str:
    return tracker.extra if isinstance(tracker, Tracker) else type(tracker).__name__
