"""The ServerApp: it runs an algorithm over the Grid and writes every round to disk."""

from __future__ import annotations

import copy
import logging
import time
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedalign.callbacks import Callback, RunInfo, Stopped, close_all, notify_end, notify_round, notify_stop
from fedalign.errors import DivergedError, FedalignError
from fedalign.experiments.folder_lock import FolderLock
from fedalign.experiments.recorder import Recorder, has_finite_losses, is_finite
from fedalign.experiments.store import RunStore, write_atomically
from fedalign.flower.client_metrics import ClientMetrics
from fedalign.flower.grid import BelowQuorumError, GridDriver, RoundFailedError
from fedalign.flower.roster_file import RosterFile
from fedalign.flower.settings import Settings, function
from fedalign.protocol.messages import RoundDone, Snapshot
from fedalign.protocol.plan import Plan, warmup_rounds
from fedalign.protocol.records import RoundRecord
from fedalign.registry import ALGORITHMS
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.simulation import SimulationResult
from fedalign.simulation.spec import initial_module

app = ServerApp()
log = logging.getLogger("flwr")  # Flower shows it with `flwr log` and `flwr run --stream`
_MAY_CHANGE = {  # on a resume
    "resume", "continue_stopped", "out", "timeout", "wait", "repeats", "quorum", "device", "roster", "trackers",
    "track",
}  # fmt: skip


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a federation, or continue the run that the setting ``resume`` names."""
    try:
        settings = Settings.read(context.run_config)
        with FolderLock(output_folder(settings, context.run_id)):
            Server(grid, settings, context.run_id).run()
    except FedalignError as error:
        log.error(str(error))  # Flower then prints a traceback and a code of its own
        raise


def output_folder(settings: Settings, run_id: int) -> Path:
    """Return the folder that a run writes: that of the run to resume, the chosen one, or one of its own."""
    return Path(settings.resume or settings.out or f"~/fedalign-runs/{run_id}").expanduser()


class Server:
    """A run over Flower: it drives the algorithm, keeps the last finished round, and tells the callbacks.

    Raises :class:`FedalignError` for wrong settings before anything is written.
    """

    def __init__(self, grid: Grid, settings: Settings, run_id: int) -> None:
        self._settings = settings
        self.folder = output_folder(settings, run_id)
        roster = RosterFile.read(Path(settings.roster).expanduser())
        self._module = initial_module(function(settings.model), settings.seed)
        self._layout = Layout(self._module)
        self._driver = GridDriver(grid, settings, roster, self._layout)
        rule = settings.make_rule()
        rule.check(settings.rounds)
        self._algorithm = ALGORITHMS.find(rule.algorithm)
        self._plan = Plan(
            rule=rule,
            rounds=settings.rounds,
            warmup=warmup_rounds(settings.warmup, settings.rounds),
            match_on=rule.match_on or settings.match_on,
            measure_training=False,
        )
        # Before anything is written: a wrong one must not leave a folder.
        callbacks, trackers = settings.make_callbacks(), settings.make_trackers(log.warning)
        planned = RunInfo(
            settings.rule, settings.seed, settings.rounds, folder=self.folder, metrics=tuple(settings.make_metrics()),
            experiment="flower", home=self.folder, settings=vars(settings),
        )  # fmt: skip
        for callback in (*callbacks, *trackers):
            callback.check(planned)
        self._metrics = ClientMetrics(settings, self._driver.exchange, self._driver.members)
        self._store = RunStore(self.folder)
        self._stopped: Stopped | None = None
        self._snapshot, last = self._open()
        self._failed = 0  # attempts at the present round
        self._callbacks: list[Callback] = [*callbacks, Recorder(self._store, None, settings.rounds), *trackers]
        past = tuple(self._store.history().rounds[: self._snapshot.round])
        self._info = replace(planned, start=self._snapshot.round, last=last, past=past)

    def run(self) -> None:
        """Run to the last round.

        A round without a quorum is repeated, as is one whose model has a loss that is not finite. After that the run
        pauses with a :class:`FedalignError` that says how to resume it.
        """
        try:
            self._run()
        finally:
            close_all(self._callbacks)

    def _run(self) -> None:
        settings = self._settings
        log.info("output in %s", self.folder)
        for callback in self._callbacks:
            callback.on_start(self._info)
        if self._stopped is None:
            self._await_quorum()
        while self._snapshot.round < settings.rounds and self._stopped is None:
            try:
                self._advance()
            except RoundFailedError as error:
                self._failed += 1
                if self._failed > settings.repeats:
                    below = isinstance(error, BelowQuorumError)
                    raise self._paused(self._no_quorum(error) if below else str(error)) from error
                log.warning("round %d is repeated: %s", self._snapshot.round, error)
                self._driver.early.forget()  # a measure may be what failed
                self._await_quorum()
        model, history = self._as_module(self._snapshot.tensors["model"]), self._store.history()
        result = SimulationResult(model, history, stopped=self._stopped)
        notify_end([(self._callbacks, result)])
        log.info("%s: %d rounds, in %s", self._stopped or "done", self._snapshot.round, self.folder)

    def _advance(self) -> None:
        """Run the algorithm from the last finished round to its end."""
        run = self._algorithm(self._plan, self._snapshot)
        reply: Any = None
        began = time.monotonic()
        while True:
            try:
                request = run.send(reply)
            except StopIteration:
                return
            except DivergedError as error:  # a faulty node may have recovered when the round is repeated
                raise BelowQuorumError(str(error)) from error
            reply = self._driver.answer(request)
            if isinstance(request, RoundDone):
                if request.record.skipped:
                    raise BelowQuorumError(request.record.skipped)
                self._check_usable(request)
                self._keep(request, time.monotonic() - began)
                if self._stopped is not None:
                    return
                began = time.monotonic()

    def _check_usable(self, done: RoundDone) -> None:
        """Refuse a round whose model nobody can go on from, so that the last good one stays the checkpoint."""
        bad = self._driver.early.not_finite()  # of the model that the next round starts from
        if "priority_only" in done.snapshot.tensors:
            bad = []  # AutoALIGN then starts the next round from that one
        if bad or not has_finite_losses(done.record) or not is_finite(done.snapshot):
            where = ", ".join(map(self._driver.members.name, bad)) or "the priority clients"
            raise RoundFailedError(f"the round's model has a loss or weights that are not finite (at {where})")

    def _keep(self, done: RoundDone, seconds: float) -> None:
        if self._metrics:
            measured = self._metrics.measure(done.model)
            done = replace(done, record=replace(done.record, metrics=measured))
        done = notify_round(self._callbacks, done, self._as_module)
        self._stopped = notify_stop(self._callbacks, done.record.round)
        record, self._snapshot, self._failed = done.record, done.snapshot, 0
        waited = self._driver.exchange.seconds
        spent = ", ".join(f"{what} {s:.1f} s" for what, s in waited.items())
        waited.clear()
        accuracy = "" if record.test_accuracy is None else f", test accuracy {100 * record.test_accuracy:.1f} %"
        log.info(
            "round %d of %d: F %.4f, %d of %d free clients admitted%s; %.1f s (waiting: %s)",
            record.round + 1,
            self._settings.rounds,
            record.global_loss if record.global_loss is not None else float("nan"),
            record.admitted,
            sum(c.reachable and not c.priority for c in record.clients),
            accuracy,
            seconds,
            spent,
        )

    def _await_quorum(self) -> None:
        """Wait until enough priority clients are connected and have reported."""
        until = time.monotonic() + self._settings.wait
        while True:
            online = self._driver.online()
            if self._driver.members.weight(online) >= self._settings.quorum - 1e-9:
                return
            if time.monotonic() >= until:
                missing = ", ".join(self._driver.members.missing(online))
                raise self._paused(self._no_quorum(f"not connected: {missing}"))
            time.sleep(1.0)

    def _no_quorum(self, why: object) -> str:
        return f"the priority clients' quorum of {self._settings.quorum:g} was not reached ({why})"

    def _paused(self, why: str) -> FedalignError:
        return FedalignError(
            f"paused before round {self._snapshot.round}: {why}; nothing is lost; "
            f"continue: flwr run … --run-config 'resume=\"{self.folder}\"'"
        )

    def _as_module(self, flat: torch.Tensor) -> nn.Module:
        module = copy.deepcopy(self._module)
        self._layout.load(module, flat)
        return module.eval()

    def _open(self) -> tuple[Snapshot, RoundRecord | None]:
        """Start in a new folder, or return the last checkpoint of the run to resume, with its last record."""
        settings, config = self._settings, self.folder / "config.toml"
        text = tomli_w.dumps(vars(settings))
        if not settings.resume:
            if not self._store.is_empty() or config.exists():
                raise FedalignError(f'{self.folder} already holds a run; continue it with resume="{self.folder}"')
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(config, text)
            return self._first(), None
        if not config.exists():
            raise FedalignError(f"{self.folder} holds no run to resume")
        _check_same(config, settings)
        points, notes = self._store.checkpoints()
        for note in notes:
            log.warning(note)
        if not points:
            self._store.rewind(None)
            return self._first(), None
        at = points[0]
        self._store.rewind(at)
        stopped = self._store.stopped()
        if settings.continue_stopped or (stopped is not None and stopped.round + 1 != at.rounds):
            self._store.mark_stopped(None)
        elif stopped is not None:
            self._stopped = stopped
            log.warning("%s; continue it nevertheless with continue-stopped=true", stopped)
        log.info("continuing from round %d", at.rounds)
        return at.snapshot, at.last

    def _first(self) -> Snapshot:
        return Snapshot(0, {"model": self._layout.flatten(self._module)})


def _check_same(config: Path, settings: Settings) -> None:
    import tomllib

    # A run of an earlier version has the defaults of settings that are newer; but it believed what clients reported.
    usual = {field.name: field.default for field in fields(Settings) if field.default is not MISSING}
    old = usual | {"trust": "report"} | tomllib.loads(config.read_text(encoding="utf-8"))
    changed = sorted(k for k, v in vars(settings).items() if k not in _MAY_CHANGE and old.get(k) != v)
    if changed:
        shown = "; ".join(f"{k} was {old.get(k)!r}, is {getattr(settings, k)!r}" for k in changed)
        raise FedalignError(f"{config.parent} was run with other settings: {shown}")
