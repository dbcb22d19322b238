"""``simulate``: a federation, a model and a rule in; a trained model and its history out."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fedalign.data.federation import Federation
from fedalign.errors import DivergedError, FedalignError, nearest
from fedalign.protocol.federated import alone, federated
from fedalign.protocol.messages import RoundDone
from fedalign.protocol.plan import Plan, warmup_rounds
from fedalign.protocol.records import History, RoundRecord
from fedalign.rules.align import Align, AutoAlign, PriorityOnly
from fedalign.rules.literature import LossWeighted
from fedalign.rules.rule import Measure, Rule, Split
from fedalign.simulation.driver import Driver, Event, LiveRun, Watch
from fedalign.simulation.engine.batched import BatchedEngine
from fedalign.simulation.engine.jobs import Data, Engine, EvalJob
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.engine.reference import ReferenceEngine
from fedalign.simulation.model_checks import check_model, check_repeatable
from fedalign.simulation.scaffold import Controls
from fedalign.training.local import LocalSGD
from fedalign.training.losses import PerSampleLoss, cross_entropy
from fedalign.training.optimizer import LocalOptimizer
from fedalign.training.participation import Full, Participation
from fedalign.training.randomness import Purpose, hashed
from fedalign.training.server import Partial, ServerOptimizer

ModelFactory = Callable[[], nn.Module]
EngineName = Literal["batched", "reference"]


class Alone:
    """In place of a rule: every client trains by itself, with no server (the `local` arm)."""


@dataclass(frozen=True)
class RunSpec:
    """One run of several that are simulated together."""

    federation: Federation
    rule: Rule | Alone
    rounds: int = 200
    warmup: float = 0.1
    local: LocalOptimizer = LocalSGD(lr=0.1, epochs=5)
    participation: Participation = Full()
    seed: int = 0
    start: int = 0  #: the round to go on from
    state: torch.Tensor | None = None  #: the model to go on from, flat (see :func:`state_of`)
    last: RoundRecord | None = None  #: the record of the round before
    server: ServerOptimizer | None = None  #: None: the server takes the mean, as FedAvg does
    watch: Watch | None = None  #: looks at every finished round, and may add to its record


@dataclass(frozen=True)
class SimulationResult:
    """What a run gives: ``model`` (a module; for `Alone` one per client), ``history``, and ``error`` if it diverged.

    ``clients`` measures the final model on every client's own test data, None where it has none.
    """

    model: Any
    history: History
    error: DivergedError | None = None
    clients: tuple[Measure | None, ...] = ()


def simulate(
    federation: Federation,
    model: ModelFactory | nn.Module,
    rule: Rule | Alone | None = None,
    rounds: int = 200,
    warmup: float = 0.1,
    local: LocalOptimizer | None = None,
    participation: Participation | None = None,
    seed: int = 0,
    device: str = "auto",
    *,
    loss: PerSampleLoss = cross_entropy,
    engine: EngineName = "batched",
    chunk: int | None = None,
    tf32: bool = False,
    server: ServerOptimizer | None = None,
    on_round: Callable[[RoundDone], None] | None = None,
) -> SimulationResult:
    """Simulate one prioritized federation.

    ``model`` is a function that makes a module (initialised by ``seed``), or a module whose weights are the start.
    ``rule`` is FedALIGN with ε = 0.2 unless given. ``warmup`` is a fraction of the rounds (below 1) or a number of
    them. ``loss`` gives one number per sample. ``tf32`` lets a GPU round the factors of products to 10 bits, which is
    faster; else they are float32. ``server`` is an optimiser as :class:`FedAdam`; without one the mean is taken.
    Raises :class:`DivergedError` if training leaves the finite numbers.

    >>> x, y = torch.randn(40, 4), torch.arange(40) % 2
    >>> fed = Federation.from_arrays([(x[:20], y[:20]), (x[20:], y[20:])], priority=[True, False])
    >>> result = simulate(fed, lambda: nn.Linear(4, 2), rounds=3, local=LocalSGD(lr=0.1, epochs=1))
    >>> len(result.history), result.model
    (3, Linear(in_features=4, out_features=2, bias=True))
    """
    spec = RunSpec(
        federation,
        rule if rule is not None else Align(),
        rounds,
        warmup,
        local if local is not None else LocalSGD(lr=0.1, epochs=5),
        participation if participation is not None else Full(),
        seed,
        server=server,
    )

    def relay(index: int, done: RoundDone) -> None:
        if on_round is not None:
            on_round(done)

    (result,) = simulate_many(
        [spec], model, loss=loss, device=device, engine=engine, chunk=chunk, tf32=tf32, on_round=relay
    )
    if result.error is not None:
        result.error.history = result.history
        raise result.error
    return result


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
        plans = [_plan(spec) for spec in specs]
        self._template = initial_module(model, specs[0].seed)
        check_repeatable(self._template)
        self.layout = Layout(self._template)
        data = Data([spec.federation.pool for spec in specs], self.device, self.layout.dtype)
        accuracy = check_model(self._template, data, [spec.federation for spec in specs], loss)
        for spec in specs:
            if isinstance(spec.rule, Rule) and spec.rule.needs_accuracy and not accuracy:
                raise FedalignError("matching on accuracy needs a task with classes; this one has none: use on='loss'")
        self._engine: Engine
        if engine == "batched":
            self._engine = BatchedEngine(self._template, loss, data, chunk, accuracy=accuracy)
        elif engine == "reference":
            self._engine = ReferenceEngine(self._template, loss, data, accuracy=accuracy)
        else:
            raise FedalignError(f"unknown engine {engine!r}; {nearest(str(engine), ['batched', 'reference'])}")
        self._runs = [
            _live(spec, plan, model, self.layout, self.device) for spec, plan in zip(specs, plans, strict=True)
        ]

    def rounds(self) -> Iterator[list[Event]]:
        """Drive all runs to their ends; after each round give every run's index with its round, or how it diverged."""
        with _matmul_precision(self._tf32):
            yield from Driver(self._engine, self._runs).drive()

    def results(self) -> list[SimulationResult]:
        """Give what the runs came to, after the last round."""
        with _matmul_precision(self._tf32):
            measured = self._client_measures()
        return [
            _result(run, self._template, self.layout, clients)
            for run, clients in zip(self._runs, measured, strict=True)
        ]

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


def simulate_many(
    specs: Sequence[RunSpec],
    model: ModelFactory | nn.Module,
    *,
    loss: PerSampleLoss = cross_entropy,
    device: str = "auto",
    engine: EngineName = "batched",
    chunk: int | None = None,
    tf32: bool = False,
    on_round: Callable[[int, RoundDone], None] = lambda index, done: None,
) -> list[SimulationResult]:
    """Simulate several runs of one model together: they advance round by round and share batches.

    A run that diverges ends with ``error`` set; the others go on.
    """
    return Simulation(specs, model, loss=loss, device=device, engine=engine, chunk=chunk, tf32=tf32).run(on_round)


@contextlib.contextmanager
def _matmul_precision(tf32: bool) -> Iterator[None]:
    """Choose how a GPU multiplies, and put back what was chosen before. A CPU multiplies in float32 either way."""
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


def resolve_device(name: str) -> torch.device:
    """Read ``auto``, ``cpu``, ``cuda`` or ``cuda:1``; auto is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise FedalignError(f"unknown device {name!r}; it must be auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise FedalignError(f"device {name!r} is not served; it must be auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FedalignError("device 'cuda' was asked for, but PyTorch finds no GPU here; use --device cpu")
    return device


def _plan(spec: RunSpec) -> Plan:
    rule = spec.rule if isinstance(spec.rule, Rule) else PriorityOnly()
    for name, value, least, most in (("rounds", spec.rounds, 1, 10**9), ("seed", spec.seed, 0, 2**63 - 1)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= value <= most:
            raise FedalignError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
    for name, given, kind in (
        ("federation", spec.federation, Federation),
        ("rule", spec.rule, Rule | Alone),
        ("local", spec.local, LocalOptimizer),
        ("participation", spec.participation, Participation),
        ("server", spec.server, ServerOptimizer | None),
    ):
        if not isinstance(given, kind):
            names = {"rule": "Rule", "server": "ServerOptimizer"}
            wanted = f"fedalign.{names.get(name) or kind.__name__}"  # type: ignore[union-attr]
            raise FedalignError(f"{name} must be a {wanted} object, not {given!r}")
    fed = spec.federation
    rule.check(spec.rounds)
    spec.local.check(spec.rounds)
    spec.participation.check(fed.roster, spec.rounds)
    match_on: Split = rule.match_on or ("heldout" if fed.has_heldout else "train")
    if match_on == "heldout" and not fed.has_heldout:
        raise FedalignError("match_on='heldout' needs held-out data; give heldout or a heldout_fraction above 0")
    inner = rule.rule if isinstance(rule, LossWeighted) else rule
    one_set = isinstance(inner, AutoAlign) and inner.is_fedalign
    if spec.local.scaffold and (rule.needs_updates or rule.fallback or isinstance(inner, AutoAlign)) and not one_set:
        raise FedalignError(f"SCAFFOLD does not go with {type(rule).__name__}: it needs to know whose update counts")
    warmup = warmup_rounds(spec.warmup, spec.rounds)
    work = tuple(spec.local.samples_for(len(client.train)) for client in fed.clients)
    return Plan(
        roster=fed.roster,
        rule=rule,
        rounds=spec.rounds,
        warmup=warmup,
        participation=spec.participation,
        seed=spec.seed,
        match_on=match_on,
        judge_on="heldout" if all(len(client.heldout) for client in fed.clients if client.priority) else "train",
        has_test=fed.has_test,
        server=spec.server,
        work=work,
    )


def initial_module(model: ModelFactory | nn.Module, seed: int) -> nn.Module:
    """Make the module that a run with this seed starts from."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(hashed(seed, Purpose.INITIAL_WEIGHTS)) >> 1)
        made = model()
    if not isinstance(made, nn.Module):
        raise FedalignError(
            f"model must be a torch.nn.Module or a function that makes one; it gave {type(made).__name__}"
        )
    return made.cpu()


def state_of(done: RoundDone) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Give what a run needs to go on after a round: the model; with a server optimiser its memory too, in rows.

    Where every client has its own model (`Alone`), a row for each, as they are: they may be large together.
    """
    if isinstance(done.model, tuple):
        return done.model
    model: torch.Tensor = done.model
    return torch.stack([model, *done.memory]) if done.memory else model


def _live(spec: RunSpec, plan: Plan, model: ModelFactory | nn.Module, layout: Layout, device: torch.device) -> LiveRun:
    if spec.state is not None:
        state = spec.state.to(device)
        if state.shape[-1] != layout.size:
            raise FedalignError(
                f"the state to go on from has {state.shape[-1]} numbers, but the model has {layout.size}"
            )
    else:
        module = initial_module(model, spec.seed)
        if Layout(module).shapes != layout.shapes:
            raise FedalignError("runs that are simulated together must have models of one shape")
        state = layout.flatten(module).to(device)
    controls: Controls | None = None
    local = spec.local
    if isinstance(spec.rule, Alone):
        if local.scaffold:
            local = dataclasses.replace(local, scaffold=False)  # alone, there is nothing to correct towards
        models = list(state) if state.dim() == 2 else [state] * len(spec.federation)
        run = alone(plan, models, spec.start)
    else:
        if plan.server is not None and layout.trainable_size < layout.size:
            plan = dataclasses.replace(plan, server=Partial(plan.server, layout.trainable_size))
        first, *memory = list(state) if state.dim() == 2 else [state]
        if local.scaffold:
            here = len(memory) - len(spec.federation) - 1  # the control variates come last
            kept = torch.stack(memory[here:]) if memory else None
            controls = Controls(len(spec.federation), layout, device, kept)
            memory = memory[:here] if memory else []
        run = federated(plan, first, spec.start, tuple(memory), spec.last)
    return LiveRun(
        run, spec.federation, local, spec.seed, spec.rounds, controls=controls, watch=spec.watch, last=spec.last
    )


def _result(run: LiveRun, template: nn.Module, layout: Layout, clients: tuple[Measure | None, ...]) -> SimulationResult:
    if run.error is not None or run.result is None:
        return SimulationResult(None, History(run.records), run.error)

    def module_of(flat: torch.Tensor) -> nn.Module:
        module = copy.deepcopy(template)
        layout.load(module, flat.cpu())
        return module

    flat = run.result.model
    model = [module_of(one) for one in flat] if isinstance(flat, tuple) else module_of(flat)
    return SimulationResult(model, History(run.records), None, clients)
