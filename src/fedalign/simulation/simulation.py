"""Several runs of one model, simulated together."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fedalign.attacks.hostile import HostileClients
from fedalign.callbacks import Stopped, close_all, notify_end, notify_error, notify_round, notify_stop
from fedalign.errors import DivergedError, FedalignError
from fedalign.personal.method import PersonalOutcome
from fedalign.protocol.messages import RoundDone, Snapshot
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import History
from fedalign.registry import ALGORITHMS
from fedalign.rules.baselines import Alone
from fedalign.rules.rule import Measure, Rule
from fedalign.simulation.device import matmul_precision, resolve_device
from fedalign.simulation.driver import Driver, Event
from fedalign.simulation.engine.jobs import Data, EvalJob
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.engine.named import EngineName, make_engine
from fedalign.simulation.engine.outputs import OutputReader
from fedalign.simulation.live_run import LiveRun
from fedalign.simulation.metrics import prepare_metrics
from fedalign.simulation.model_checks import check_model, check_repeatable
from fedalign.simulation.personal_runs import personal_of
from fedalign.simulation.scaffold import Controls
from fedalign.simulation.spec import ModelFactory, RunSpec, initial_module, plan_of
from fedalign.training.losses import PerSampleLoss, cross_entropy
from fedalign.training.server import Partial


@dataclass(frozen=True)
class SimulationResult:
    """What a run gives: ``model`` (a module; for `Alone` one per client), ``history``, and ``error`` if it diverged.

    ``clients`` measures the final model on every client's own test data, None where it has none. ``stopped`` says why
    and when a callback ended the run before its last round. ``personal`` has the outcome of every personal method for
    every client, by the method's name.
    """

    model: Any
    history: History
    error: DivergedError | None = None
    clients: tuple[Measure | None, ...] = ()
    stopped: Stopped | None = None
    personal: Mapping[str, tuple[PersonalOutcome | None, ...]] = field(default_factory=dict)


class Simulation:
    """Several runs of one model, checked and ready; :meth:`run` simulates them together."""

    def __init__(
        self,
        specs: Sequence[RunSpec],
        model: ModelFactory | nn.Module,
        *,
        loss: PerSampleLoss = cross_entropy,
        device: str = "auto",
        engine: EngineName = "batched",
        chunk: int | None = None,
        tf32: bool = False,
    ) -> None:
        self._tf32 = tf32
        if not specs:
            raise FedalignError("there is nothing to simulate: no runs were given")
        self.device = resolve_device(device)
        plans = [plan_of(spec) for spec in specs]
        self._specs = list(specs)
        self._model, self._template = model, initial_module(model, specs[0].seed)
        check_repeatable(self._template)
        self.layout = Layout(self._template)
        for method in {id(m): m for spec in specs for m in spec.personal.values()}.values():
            method.check(self._template)
        hostile = _hostile_clients(specs)
        own_pools = [pool for one in hostile if one is not None for pool in one.pools]
        pools = [*(spec.federation.pool for spec in specs), *own_pools]
        data = Data(pools, self.device, self.layout.dtype)
        accuracy = check_model(self._template, data, [spec.federation for spec in specs], loss)
        for spec in specs:
            if isinstance(spec.rule, Rule) and spec.rule.needs_accuracy and not accuracy:
                raise FedalignError("matching on accuracy needs a task with classes; this one has none: use on='loss'")
        self._engine = make_engine(engine, self._template, loss, data, chunk, accuracy=accuracy)
        self._results: list[SimulationResult] = []
        self._runs = [
            _live(spec, plan, model, self.layout, self.device, one)
            for spec, plan, one in zip(specs, plans, hostile, strict=True)
        ]
        if any(spec.metrics for spec in specs):
            reader = OutputReader(self._template, self.layout, data)
            each = prepare_metrics(
                [(spec.metrics, spec.federation) for spec in specs], reader, self.layout.flatten(self._template)
            )
            for run, metrics in zip(self._runs, each, strict=True):
                run.metrics = metrics

    def rounds(self) -> Iterator[list[Event]]:
        """Drive all runs to their ends; after each round give every run's index with its round, or how it diverged.

        Callbacks have heard of a round when it is given.
        """
        with matmul_precision(self._tf32):
            try:
                for spec in self._specs:
                    for callback in spec.callbacks:
                        callback.on_start(spec.info)
                for events in Driver(self._engine, self._runs).drive():
                    yield [(index, self._notify(index, event)) for index, event in events]
                self._results = self._finish()
                notify_end((spec.callbacks, result) for spec, result in zip(self._specs, self._results, strict=True))
            finally:
                close_all([callback for spec in self._specs for callback in spec.callbacks])

    def _notify(self, index: int, event: RoundDone | DivergedError) -> RoundDone | DivergedError:
        callbacks = self._specs[index].callbacks
        if isinstance(event, DivergedError):
            notify_error(callbacks, event)
            return event
        done = notify_round(callbacks, event, self.module)
        self._runs[index].records.append(done.record)
        self._runs[index].stopped = notify_stop(callbacks, done.record.round)
        return done

    def module(self, flat: torch.Tensor | tuple[torch.Tensor, ...]) -> nn.Module | list[nn.Module]:
        """Return a flat model as a module in eval mode, on the CPU; several flat models as a list of modules."""
        if isinstance(flat, tuple):
            return [self._module(one) for one in flat]
        return self._module(flat)

    def _module(self, flat: torch.Tensor) -> nn.Module:
        module = copy.deepcopy(self._template)
        self.layout.load(module, flat.cpu())
        return module.eval()

    @property
    def stops(self) -> dict[int, Stopped]:
        """The runs that callbacks have stopped so far, by their index."""
        return {index: run.stopped for index, run in enumerate(self._runs) if run.stopped is not None}

    def results(self) -> list[SimulationResult]:
        """Return the runs' results, after the last round."""
        return self._results

    def _finish(self) -> list[SimulationResult]:
        found = []
        own = personal_of(self._engine, self._specs, self._runs, self._model, self._module)
        for spec, run, clients, personal in zip(self._specs, self._runs, self._client_measures(), own, strict=True):
            history = History([*spec.past, *run.records])
            if run.error is not None or run.result is None:
                found.append(SimulationResult(None, history, run.error))
            else:
                stopped = run.stopped or spec.stopped
                served = self.module(run.result.model)
                found.append(SimulationResult(served, history, None, clients, stopped, personal))
        return found

    def _client_measures(self) -> list[tuple[Measure | None, ...]]:
        """Measure final models on all clients' test data, all runs at once."""
        jobs: list[EvalJob] = []
        where: list[tuple[int, int]] = []
        for i, run in enumerate(self._runs):
            if run.result is None:
                continue
            model = run.result.model
            for k, client in enumerate(run.federation.clients):
                if len(client.test):
                    where.append((i, k))
                    own = model[k] if isinstance(model, tuple) else model
                    jobs.append(EvalJob(own, run.federation.pool, client.test))
        found = dict(zip(where, self._engine.evaluate(jobs), strict=True))
        return [
            tuple(found.get((i, k)) for k in range(len(run.federation))) if run.result is not None else ()
            for i, run in enumerate(self._runs)
        ]

    def run(self, on_round: Callable[[int, RoundDone], None] = lambda index, done: None) -> list[SimulationResult]:
        """Drive all runs to their ends; ``on_round`` gets a run's index and its finished round."""
        for events in self.rounds():
            for index, event in events:
                if isinstance(event, RoundDone):
                    on_round(index, event)
        return self.results()


def _hostile_clients(specs: Sequence[RunSpec]) -> list[HostileClients | None]:
    """Make the runs' hostile clients; runs with the same adversary and federation share them and their data."""
    made: dict[tuple[int, int, int, int], HostileClients] = {}
    found: list[HostileClients | None] = []
    for spec in specs:
        if spec.adversary is None:
            found.append(None)
            continue
        key = (id(spec.adversary), id(spec.federation), spec.seed, spec.rounds)
        if key not in made:
            made[key] = HostileClients(spec.adversary, spec.federation, spec.seed, spec.rounds)
        found.append(made[key])
    return found


def _live(
    spec: RunSpec, plan: Plan, model: ModelFactory | nn.Module, layout: Layout, device: torch.device,
    hostile: HostileClients | None,
) -> LiveRun:  # fmt: skip
    snapshot = _start(spec, model, layout, device)
    local, controls = spec.local, None
    if isinstance(spec.rule, Alone):
        if local.scaffold:
            local = dataclasses.replace(local, scaffold=False)  # alone, there is nothing to correct towards
    elif local.scaffold:
        controls = Controls(len(spec.federation), layout, device, snapshot.tensors)
    if plan.server is not None and layout.trainable_size < layout.size:
        plan = dataclasses.replace(plan, server=Partial(plan.server, layout.trainable_size))
    if spec.stopped is not None:
        plan = dataclasses.replace(plan, rounds=snapshot.round)  # so that it ends with the model that it has
    return LiveRun(
        ALGORITHMS.find(spec.rule.algorithm)(plan, snapshot),
        spec.federation,
        local,
        spec.seed,
        spec.rounds,
        layout.trainable_size,
        spec.participation,
        spec.aggregator,
        spec.client_steps,
        spec.server_steps,
        controls,
        spec.roster if hostile is None else hostile.claimed(spec.roster),
        hostile,
        spec.measure_every,
    )


def _start(spec: RunSpec, model: ModelFactory | nn.Module, layout: Layout, device: torch.device) -> Snapshot:
    """Return the snapshot to go on from, on the device, or that of a new run."""
    if spec.snapshot is None:
        module = initial_module(model, spec.seed)
        if Layout(module).shapes != layout.shapes:
            raise FedalignError("runs that are simulated together must have models of one shape")
        return Snapshot(0, {"model": layout.flatten(module).to(device)})
    tensors = {name: tensor.to(device) for name, tensor in spec.snapshot.tensors.items()}
    size = next(iter(tensors.values())).shape[-1]
    if size != layout.size:
        raise FedalignError(f"the state to go on from has {size} numbers, but the model has {layout.size}")
    return dataclasses.replace(spec.snapshot, tensors=tensors)
