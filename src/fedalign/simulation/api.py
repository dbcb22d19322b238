"""``simulate``: a federation, a model and a rule in; a trained model and its history out."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedalign.aggregation.aggregator import Aggregator, WeightedMean
from fedalign.aggregation.update_steps import ClientStep, ServerStep
from fedalign.attacks.adversary import Adversary
from fedalign.attacks.settings import as_adversary
from fedalign.callbacks import Callback
from fedalign.data.federation import Federation
from fedalign.errors import FedalignError
from fedalign.experiments.folder_lock import FolderLock
from fedalign.experiments.single_run import in_folder, with_trackers
from fedalign.ledger.ledger import Ledger
from fedalign.ledger.settings import as_ledger
from fedalign.ledger.valuation import Valuation
from fedalign.metrics.metric import as_metrics
from fedalign.personal.method import PersonalMethod
from fedalign.personal.settings import as_methods
from fedalign.protocol.messages import RoundDone
from fedalign.registry import (
    AGGREGATORS,
    CALLBACKS,
    CLIENT_STEPS,
    LOCAL_OPTIMIZERS,
    LOSSES,
    MODELS,
    PARTICIPATION,
    RULES,
    SERVER_OPTIMIZERS,
    SERVER_STEPS,
    TRACKERS,
)
from fedalign.rules.align import Align
from fedalign.rules.baselines import Alone
from fedalign.rules.rule import Rule
from fedalign.rules.trust import with_trust
from fedalign.simulation.engine.named import EngineName
from fedalign.simulation.simulation import Simulation, SimulationResult
from fedalign.simulation.spec import ModelFactory, RunSpec
from fedalign.training.local import LocalSGD
from fedalign.training.losses import PerSampleLoss, cross_entropy
from fedalign.training.optimizer import LocalOptimizer
from fedalign.training.participation import Full, Participation
from fedalign.training.server import ServerOptimizer

Named = str | Mapping[str, Any]  # "trimmed-mean(trim=0.2)", or {"kind": "trimmed-mean", "trim": 0.2}


def simulate(
    federation: Federation,
    model: ModelFactory | nn.Module | Named,
    rule: Rule | Alone | Named | None = None,
    rounds: int = 200,
    warmup: float = 0.1,
    local: LocalOptimizer | Named | None = None,
    participation: Participation | Named | None = None,
    seed: int = 0,
    device: str = "auto",
    *,
    loss: PerSampleLoss | Named = cross_entropy,
    engine: EngineName = "batched",
    chunk: int | None = None,
    tf32: bool = False,
    server: ServerOptimizer | Named | None = None,
    aggregator: Aggregator | Named | None = None,
    client_steps: Sequence[ClientStep | Named] = (),
    server_steps: Sequence[ServerStep | Named] = (),
    trust: str = "report",
    adversary: Adversary | Named | None = None,
    free_cap: float = math.inf,
    free_total: float = math.inf,
    ledger: Ledger | Valuation | Named | bool | None = None,
    metrics: Any = (),
    personal: Sequence[PersonalMethod | Named] | str = (),
    callbacks: Sequence[Callback | Named] = (),
    track: Sequence[Callback | Named] | str = (),
    out: str | Path | None = None,
    resume: bool = False,
    continue_stopped: bool = False,
    on_round: Callable[[RoundDone], None] | None = None,
) -> SimulationResult:
    """Simulate one prioritized federation.

    ``model`` is a function that makes a module (initialised by ``seed``), or a module whose weights are the start.
    ``rule`` is FedALIGN with ε = 0.2 unless given. ``warmup`` is a fraction of the rounds (below 1) or a number of
    them. ``loss`` gives one number per sample. ``tf32`` lets a GPU round the factors of products to 10 bits, which is
    faster; else they are float32. ``server`` is an optimiser such as :class:`FedAdam`; without one the aggregate is
    taken as it is. ``aggregator`` is the weighted mean unless given. ``free_cap`` is the largest weight of one free
    client, and ``free_total`` that of all admitted ones together, where all priority clients together weigh 1. With
    ``trust="verify"`` the priority clients verify what free clients' updates do (:class:`Verified`), also with options,
    ``"verify(within=4.0)"``; otherwise the rule believes what free clients report. ``adversary`` makes some free
    clients hostile: an :class:`Adversary`, or a text or a table as in settings files. ``ledger`` values every client
    in every round (:class:`Ledger`, or a method such as ``"gtg-shapley"``). ``metrics`` maps names to functions of
    outputs and targets, objects of torchmetrics or built-in names; a list of names will do. They are measured after
    every round, for priority and free clients. ``personal`` names methods by which every client makes a model of its
    own of the final one: ``["refine"]``. Their outcomes are in ``result.personal``. ``callbacks`` hear of every round
    and may stop the run (:class:`EarlyStopping`); ``track`` names trackers, such as ``"mlflow"``. ``out`` is a folder
    for ``rounds.jsonl``, checkpoints and the final weights; with ``resume`` a run that was interrupted there goes on,
    to the same result. One that had stopped early needs ``continue_stopped``, too.
    Every seam takes an object of your own class, or a name as in settings files:
    ``rule="auto"``, ``aggregator="trimmed-mean(trim=0.2)"``, ``loss="mine:loss"``.
    Raises :class:`DivergedError` if training leaves the finite numbers.

    >>> import torch
    >>> x, y = torch.randn(40, 4), torch.arange(40) % 2
    >>> fed = Federation.from_arrays([(x[:20], y[:20]), (x[20:], y[20:])], priority=[True, False])
    >>> result = simulate(fed, lambda: nn.Linear(4, 2), rounds=3, local=LocalSGD(lr=0.1, epochs=1))
    >>> len(result.history), result.model
    (3, Linear(in_features=4, out_features=2, bias=True))
    """
    chosen = RULES.accept("rule", rule) if rule is not None else Align()
    spec = RunSpec(
        federation,
        with_trust(chosen, trust) if isinstance(chosen, Rule) else chosen,
        rounds,
        warmup,
        LOCAL_OPTIMIZERS.accept("local", local) if local is not None else LocalSGD(lr=0.1, epochs=5),
        PARTICIPATION.accept("participation", participation) if participation is not None else Full(),
        seed,
        server=SERVER_OPTIMIZERS.accept("server", server),
        aggregator=AGGREGATORS.accept("aggregator", aggregator) if aggregator is not None else WeightedMean(),
        client_steps=[CLIENT_STEPS.accept("client_steps", step) for step in client_steps],
        server_steps=[SERVER_STEPS.accept("server_steps", step) for step in server_steps],
        adversary=as_adversary(adversary),
        free_cap=free_cap,
        free_total=free_total,
        callbacks=[CALLBACKS.accept("callbacks", callback) for callback in callbacks],
        metrics=as_metrics(metrics),
        personal=as_methods(personal),
        keep_personal=True,
        ledger=as_ledger(ledger),
    )
    trackers = [TRACKERS.accept("track", one) for one in ([track] if isinstance(track, str) else track)]
    if out is None and (resume or continue_stopped):
        raise FedalignError("resume needs the folder of the run to continue: out='…'")
    if isinstance(model, str | Mapping):
        model = functools.partial(MODELS.make, MODELS.resolve("model", model))  # made anew, with the seed's weights
    per_sample: PerSampleLoss = LOSSES.accept("loss", loss)
    with contextlib.nullcontext() if out is None else FolderLock(Path(out)):
        if out is not None:
            spec = in_folder(spec, Path(out), resume=resume, continue_stopped=continue_stopped)
        spec = with_trackers(spec, trackers)
        simulation = Simulation([spec], model, loss=per_sample, device=device, engine=engine, chunk=chunk, tf32=tf32)
        return _finished(*simulation.run(lambda _, done: None if on_round is None else on_round(done)))


def _finished(result: SimulationResult) -> SimulationResult:
    """Return a result; raises its error, with the rounds until then, if training diverged."""
    if result.error is not None:
        result.error.history = result.history
        raise result.error
    return result


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
