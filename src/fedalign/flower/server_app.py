"""The ServerApp: it runs an algorithm over the Grid and writes every round to disk."""

from __future__ import annotations

import copy
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedalign.callbacks import Callback, RunInfo, close_all, notify_end, notify_round, notify_stop
from fedalign.errors import DivergedError, FedalignError
from fedalign.experiments.folder_lock import FolderLock
from fedalign.experiments.recorder import Recorder, has_finite_losses, is_finite
from fedalign.experiments.store import RunStore
from fedalign.flower.audit import AuditLog
from fedalign.flower.client_metrics import ClientMetrics
from fedalign.flower.delivery import deliver_models, may_have
from fedalign.flower.grid import BelowQuorumError, GridDriver, RoundFailedError
from fedalign.flower.live_roster import roster_changes
from fedalign.flower.own_accounts import send_accounts, servers_signer
from fedalign.flower.packing import Packing
from fedalign.flower.patience import Timer
from fedalign.flower.personal_models import PersonalModels
from fedalign.flower.polling import pause_after
from fedalign.flower.roster_file import RosterFile
from fedalign.flower.run_folder import open_run
from fedalign.flower.run_identity import ModelIdentity, RunIdentity, read_identity
from fedalign.flower.run_plan import complete, plan_of
from fedalign.flower.run_report import RunReport
from fedalign.flower.server_log import server_log
from fedalign.flower.server_status import PausedError, ServerStatus
from fedalign.flower.settings import Settings
from fedalign.flower.shipping import Traffic
from fedalign.ledger.writer import LedgerWriter
from fedalign.protocol.messages import RoundDone, Snapshot
from fedalign.registry import ALGORITHMS
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.simulation import SimulationResult

app = ServerApp()
log = logging.getLogger("flwr")  # Flower shows it with `flwr log` and `flwr run --stream`


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

    def __init__(self, grid: Grid, settings: Settings, run_id: int, timer: Timer | None = None) -> None:
        self._settings = settings
        self.folder = output_folder(settings, run_id)
        roster = RosterFile.read(Path(settings.roster).expanduser())
        self._module = settings.make_module(start=True)
        self._layout = Layout(self._module)
        model = ModelIdentity.of(self._module)
        former = read_identity(self.folder) if settings.resume else None
        note = None if former is None else former.check_model(model, self.folder)
        for method in settings.make_personal().values():
            method.check(self._module)
        packing = Packing.of(settings)
        self._driver = GridDriver(grid, settings, roster, self._layout, packing, timer, former)
        self._plan = plan_of(settings, self._layout, self._driver.members)
        if former is not None:  # of a run that is extended, the warm-up stays as it was
            self._plan = replace(self._plan, warmup=former.warmup)
        self._algorithm = ALGORITHMS.find(self._plan.rule.algorithm)
        # Before anything is written: a wrong one must not leave a folder.
        callbacks, trackers = settings.make_callbacks(), settings.make_trackers(log.warning)
        planned = RunInfo(
            settings.arm_name, settings.seed, settings.rounds, folder=self.folder, home=self.folder,
            metrics=tuple(settings.make_metrics()), experiment=settings.name or "flower", settings=settings.as_table(),
        )  # fmt: skip
        self._signer = None if self._plan.ledger is None else servers_signer(self._plan.ledger)
        ledger = [] if self._plan.ledger is None else [LedgerWriter(self._plan.ledger, self._signer)]
        for callback in (*callbacks, *ledger, *trackers):
            callback.check(planned)
        self._metrics = ClientMetrics(settings, self._driver.exchange, self._driver.shipping, self._driver.members)
        self._store = RunStore(self.folder)
        self.audit = AuditLog(self.folder)
        self._driver.roll.report = self.audit.add
        opened = open_run(self._store, settings, self._first(), self.audit)
        self._identity = RunIdentity(model, self._plan.warmup, data=self._driver.roll.greetings.counts.data)
        self._identity.keep(self.folder, self._driver.members)
        if former is not None:
            for event, client, details in roster_changes(former.roster(), self._identity.roster()):
                self.audit.add(event, client, **details)
        if note:
            log.warning(note)
            self.audit.add("model_changed", reason=note)
        self._snapshot, self._stopped = opened.snapshot, opened.stopped
        self._failed = 0  # attempts at the present round
        driver = self._driver
        self._status = ServerStatus(self.folder, run_id, settings.quorum, driver.exchange, driver.members)
        recorder = Recorder(self._store, None, settings.rounds)
        report = RunReport(self.folder)
        self._callbacks: list[Callback] = [*callbacks, *ledger, recorder, report, self._status, *trackers]
        past = tuple(self._store.history().rounds[: self._snapshot.round])
        self._info = replace(planned, start=self._snapshot.round, last=opened.last, past=past)

    def run(self) -> None:
        """Run to the last round.

        A round without a quorum is repeated, as is one whose model has a loss that is not finite. After that the run
        pauses with a :class:`FedalignError` that says how to resume it.
        """
        try:
            with server_log(self.folder), self._status:
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
                self.audit.add("round_repeated", reason=str(error))
                self._status.repeated(str(error), self._failed)
                self._driver.early.forget()  # a measure may be what failed
                self._await_quorum()
        final, history = self._snapshot.tensors["model"], self._store.history()
        members, present = self._driver.members, len(history.rounds[-1].clients)
        clients = self._driver.measure_finally(final, present)
        allowed = may_have(settings.deliver, members, history)
        asking = PersonalModels(settings.make_personal(), self._driver.exchange, members, self.audit)
        personal = asking.ask(final, allowed, present, settings.rounds)
        result = SimulationResult(
            self._as_module(final), history, clients=clients, stopped=self._stopped, personal=personal
        )
        notify_end([(self._callbacks, result)])
        self._driver.exchange.next_round()  # whoever was late in the last round may have the model nevertheless
        deliver_models({"final": final}, allowed, self._driver.exchange, members, self.audit)
        if self._signer is not None:
            send_accounts(self.folder, self._signer, self._driver.exchange, members, self.audit)
        self.audit.add("run_ended", rounds=self._snapshot.round, stopped=str(self._stopped or ""))
        log.info("%s: %d rounds, in %s", self._stopped or "done", self._snapshot.round, self.folder)

    def _advance(self) -> None:
        """Run the algorithm from the last finished round to its end."""
        members = self._driver.members  # since the quorum is there, it is known who has test data
        plan = replace(self._plan, has_test=any(map(members.is_priority, members.with_test())))
        run = self._algorithm(plan, self._snapshot)
        self._driver.controls.restore(self._snapshot.tensors)
        self.audit.round = self._snapshot.round
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
                if request.record.skipped and not self._driver.attendance.nobody:
                    raise BelowQuorumError(request.record.skipped)
                request = complete(request, self._driver.controls)
                self._check_usable(request)
                self._keep(request, time.monotonic() - began)
                if self._stopped is not None:
                    return
                began = time.monotonic()

    def _check_usable(self, done: RoundDone) -> None:
        """Refuse a round whose model nobody can go on from, so that the last good one stays the checkpoint."""
        tensors = done.snapshot.tensors
        bad = self._driver.early.not_finite(tensors.get("training", tensors["model"]))  # the next round's model
        if "priority_only" in tensors:
            bad = []  # AutoALIGN then starts the next round from that one
        if bad or not has_finite_losses(done.record) or not is_finite(done.snapshot):
            where = ", ".join(map(self._driver.members.name, bad)) or "the priority clients"
            raise RoundFailedError(f"the round's model has a loss or weights that are not finite (at {where})")

    def _keep(self, done: RoundDone, seconds: float) -> None:
        if self._metrics:
            measured = self._metrics.measure(done.model)
            done = replace(done, record=replace(done.record, metrics=measured))
        record = self._driver.explained(done.record)
        done = replace(done, record=replace(record, **vars(self._driver.shipping.traffic)))
        self._driver.shipping.traffic = Traffic()
        done = notify_round(self._callbacks, done, self._as_module)
        self._identity.keep(self.folder, self._driver.members)
        self._stopped = notify_stop(self._callbacks, done.record.round)
        record, self._snapshot, self._failed = done.record, done.snapshot, 0
        self.audit.round = self._snapshot.round
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
        """Wait until enough priority clients are connected and have reported.

        Free clients that are connected by then have the grace time to report, too; who comes later joins a later round.
        It is the whole setting here: nodes that have waited for a run look for messages every few seconds.
        """
        patience = self._settings.patience
        driver, timer = self._driver, self._driver.exchange.timer
        began = timer.now()
        ready: float | None = None  # when the quorum was there
        while True:
            online, now = driver.online(), timer.now()
            if driver.members.weight(online) >= self._settings.quorum - 1e-9:
                ready = now if ready is None else ready
                extra = patience.extra(ready - began, for_priority=True)
                if now - ready >= extra or not driver.roll.unheard(priority=False):
                    self._status.running()
                    return
            else:
                self._status.waiting()
                if now - began >= self._settings.wait and not driver.roll.unheard(priority=True):
                    missing = ", ".join(driver.members.missing(online))
                    raise self._paused(self._no_quorum(f"not connected: {missing}"))
            timer.sleep(pause_after(now - began, 0.1, 1.0))

    def _no_quorum(self, why: object) -> str:
        return f"the priority clients' quorum of {self._settings.quorum:g} was not reached ({why})"

    def _paused(self, why: str) -> PausedError:
        self.audit.add("run_paused", reason=why)
        return PausedError(
            f"paused before round {self._snapshot.round}: {why}; nothing is lost; "
            f"continue: flwr run … --run-config 'resume=\"{self.folder}\"'"
        )

    def _as_module(self, flat: torch.Tensor) -> nn.Module:
        module = copy.deepcopy(self._module)
        self._layout.load(module, flat)
        return module.eval()

    def _first(self) -> Snapshot:
        return Snapshot(0, {"model": self._layout.flatten(self._module)})
