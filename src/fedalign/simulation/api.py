"""``simulate``: a federation, a model and a rule in; a trained model and its history out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fedalign.errors import DivergedError, FedalignError, nearest
from fedalign.federation import Federation
from fedalign.history import History
from fedalign.local import LocalSGD
from fedalign.losses import PerSampleLoss, cross_entropy
from fedalign.participation import Full, Participation
from fedalign.protocol import Plan, RoundDone, alone, federated, warmup_rounds
from fedalign.randomness import Purpose, hashed
from fedalign.rules import Align, PriorityOnly, Rule, Split
from fedalign.simulation.driver import Driver, LiveRun
from fedalign.simulation.engine_batched import BatchedEngine
from fedalign.simulation.engine_reference import ReferenceEngine
from fedalign.simulation.jobs import Data, Engine
from fedalign.simulation.layout import Layout

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
    local: LocalSGD = LocalSGD(lr=0.1, epochs=5)
    participation: Participation = Full()
    seed: int = 0
    start: int = 0  #: the round to go on from
    state: torch.Tensor | None = None  #: the model to go on from, flat (for `Alone`, one row per client)


@dataclass(frozen=True)
class SimulationResult:
    """What a run gives: ``model`` (a module; for `Alone` one per client), ``history``, and ``error`` if it diverged."""

    model: Any
    history: History
    error: DivergedError | None = None


def simulate(
    federation: Federation,
    model: ModelFactory | nn.Module,
    rule: Rule | Alone | None = None,
    rounds: int = 200,
    warmup: float = 0.1,
    local: LocalSGD | None = None,
    participation: Participation | None = None,
    seed: int = 0,
    device: str = "auto",
    *,
    loss: PerSampleLoss = cross_entropy,
    engine: EngineName = "batched",
    chunk: int | None = None,
    on_round: Callable[[RoundDone], None] | None = None,
) -> SimulationResult:
    """Simulate one prioritized federation.

    ``model`` is a function that makes a module (initialised by ``seed``), or a module whose weights are the start.
    ``rule`` is FedALIGN with ε = 0.2 unless given. ``warmup`` is a fraction of the rounds (below 1) or a number of
    them. ``loss`` gives one number per sample. Raises :class:`DivergedError` if training leaves the finite numbers.

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
    )

    def relay(index: int, done: RoundDone) -> None:
        if on_round is not None:
            on_round(done)

    (result,) = simulate_many([spec], model, loss=loss, device=device, engine=engine, chunk=chunk, on_round=relay)
    if result.error is not None:
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
    ) -> None:
        if not specs:
            raise FedalignError("there is nothing to simulate: no runs were given")
        self.device = resolve_device(device)
        self._template = _initial(model, specs[0].seed)
        self.layout = Layout(self._template)
        plans = [_plan(spec) for spec in specs]
        data = Data([spec.federation.pool for spec in specs], self.device, self.layout.dtype)
        _check_model(self._template, data, specs, loss)
        self._engine: Engine
        if engine == "batched":
            self._engine = BatchedEngine(self._template, loss, data, chunk)
        elif engine == "reference":
            self._engine = ReferenceEngine(self._template, loss, data)
        else:
            raise FedalignError(f"unknown engine {engine!r}; {nearest(str(engine), ['batched', 'reference'])}")
        self._runs = [
            _live(spec, plan, model, self.layout, self.device) for spec, plan in zip(specs, plans, strict=True)
        ]

    def run(self, on_round: Callable[[int, RoundDone], None] = lambda index, done: None) -> list[SimulationResult]:
        """Drive all runs to their ends. ``on_round`` gets a run's index and its finished round."""
        Driver(self._engine, self._runs, on_round).drive()
        return [_result(run, self._template, self.layout) for run in self._runs]


def simulate_many(
    specs: Sequence[RunSpec],
    model: ModelFactory | nn.Module,
    *,
    loss: PerSampleLoss = cross_entropy,
    device: str = "auto",
    engine: EngineName = "batched",
    chunk: int | None = None,
    on_round: Callable[[int, RoundDone], None] = lambda index, done: None,
) -> list[SimulationResult]:
    """Simulate several runs of one model together: they advance round by round and share batches.

    A run that diverges ends with ``error`` set; the others go on.
    """
    return Simulation(specs, model, loss=loss, device=device, engine=engine, chunk=chunk).run(on_round)


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
    if isinstance(spec.rounds, bool) or not isinstance(spec.rounds, int) or spec.rounds < 1:
        raise FedalignError(f"rounds must be a whole number of at least 1, not {spec.rounds!r}")
    if not isinstance(spec.rule, Rule | Alone):
        raise FedalignError(f"rule must be a fedalign.Rule, not {spec.rule!r}")
    fed = spec.federation
    rule.check(spec.rounds)
    spec.local.check(spec.rounds)
    spec.participation.check(fed.roster, spec.rounds)
    if rule.needs_accuracy and not fed.pool.has_classes:
        raise FedalignError(
            "matching on accuracy needs labels that are class numbers; here they are numbers: use on='loss'"
        )
    match_on: Split = rule.match_on or ("heldout" if fed.has_heldout else "train")
    if match_on == "heldout" and not fed.has_heldout:
        raise FedalignError("match_on='heldout' needs held-out data; give heldout or a heldout_fraction above 0")
    warmup = warmup_rounds(spec.warmup, spec.rounds)
    return Plan(fed.roster, rule, spec.rounds, warmup, spec.participation, spec.seed, match_on, fed.has_test)


def _initial(model: ModelFactory | nn.Module, seed: int) -> nn.Module:
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


def _check_model(template: nn.Module, data: Data, specs: Sequence[RunSpec], loss: PerSampleLoss) -> None:
    """Try the model on one sample, and see that its outputs fit the labels."""
    dropout = [type(m).__name__ for m in template.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    if dropout:
        raise FedalignError(
            f"the model has {dropout[0]}, whose masks come from hidden random state, so results could not be repeated "
            "or resumed; leave it out (weight_decay or clip regularise too)"
        )
    probe = copy.deepcopy(template).to(data.device).eval()
    x, y = data.batch(torch.zeros(1, dtype=torch.int64, device=data.device))
    shape = tuple(x.shape[1:])
    try:
        with torch.no_grad():
            outputs = probe(x)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FedalignError(f"the model does not take samples of shape {shape}: {first}") from error
    if data.has_classes:
        classes = outputs.shape[1] if outputs.dim() > 1 else 1
        for federation in {id(s.federation): s.federation for s in specs}.values():
            _check_labels(federation, classes)
    elif loss is cross_entropy:
        raise FedalignError(
            "the labels are real numbers, which cross-entropy cannot use; pass loss=fedalign.squared_error"
        )
    try:
        with torch.no_grad():
            losses = loss(outputs, y)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FedalignError(f"the loss fails on outputs of shape {tuple(outputs.shape)}: {first}") from error
    if tuple(losses.shape) != (1,):
        raise FedalignError(
            f"the loss must give one number per sample; for one sample it gave shape {tuple(losses.shape)}"
        )


def _check_labels(federation: Federation, classes: int) -> None:
    if int(federation.pool.y.max()) < classes:
        return
    labels = federation.pool.y.numpy()
    for client in federation.clients:
        for split in ("train", "heldout", "test"):
            rows = client.rows(split)
            if len(rows) and int(labels[rows].max()) >= classes:
                raise FedalignError(
                    f"client {client.name!r} has label {int(labels[rows].max())} in its {split} data, "
                    f"but the model has {classes} outputs (labels 0 to {classes - 1})"
                )


def _live(spec: RunSpec, plan: Plan, model: ModelFactory | nn.Module, layout: Layout, device: torch.device) -> LiveRun:
    if spec.state is not None:
        state = spec.state.to(device)
    else:
        module = _initial(model, spec.seed)
        if Layout(module).shapes != layout.shapes:
            raise FedalignError("runs that are simulated together must have models of one shape")
        state = layout.flatten(module).to(device)
    if isinstance(spec.rule, Alone):
        models = list(state) if state.dim() == 2 else [state] * len(spec.federation)
        run = alone(plan, models, spec.start)
    else:
        run = federated(plan, state, spec.start)
    return LiveRun(run, spec.federation, spec.local, spec.seed, spec.rounds)


def _result(run: LiveRun, template: nn.Module, layout: Layout) -> SimulationResult:
    if run.error is not None or run.result is None:
        return SimulationResult(None, History(), run.error)

    def module_of(flat: torch.Tensor) -> nn.Module:
        module = copy.deepcopy(template)
        layout.load(module, flat.cpu())
        return module

    flat = run.result.model
    model = [module_of(one) for one in flat] if isinstance(flat, tuple) else module_of(flat)
    return SimulationResult(model, run.result.history)
