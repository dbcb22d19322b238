"""The personal models of finished runs, as the results of a simulation have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from fedalign.personal.method import PersonalOutcome, head_of
from fedalign.simulation.engine.jobs import Engine
from fedalign.simulation.live_run import LiveRun
from fedalign.simulation.personal_work import FinishedRun, personal_outcomes
from fedalign.simulation.spec import ModelFactory, RunSpec, initial_module

Outcomes = Mapping[str, tuple[PersonalOutcome, ...]]  # by method, one for each client


def personal_of(
    engine: Engine,
    specs: Sequence[RunSpec],
    runs: Sequence[LiveRun],
    model: ModelFactory | nn.Module,
    module: Callable[[torch.Tensor], nn.Module],
) -> list[Outcomes]:
    """Let the clients of all runs make personal models of the final ones, and measure them.

    A run that diverged has none, nor has one of clients that train alone. ``module`` makes a module of a flat model.
    """
    live: dict[int, FinishedRun] = {}
    for i, (spec, run) in enumerate(zip(specs, runs, strict=True)):
        if spec.personal and run.result is not None and not isinstance(run.result.model, tuple):
            first = initial_module(model, spec.seed)
            live[i] = FinishedRun(
                run.federation,
                spec.personal,
                served=run.result.model,
                initial=engine.layout.flatten(first).to(engine.device),
                local=run.local,
                seed=spec.seed,
                rounds=spec.rounds,
                head=head_of(first),
                hostile=run.hostile,
                keep=spec.keep_personal,
            )
    found = dict(zip(live, personal_outcomes(engine, list(live.values())), strict=True))

    def as_result(outcome: PersonalOutcome) -> PersonalOutcome:
        return outcome if outcome.model is None else replace(outcome, model=module(outcome.model))

    return [{label: tuple(map(as_result, own)) for label, own in found.get(i, {}).items()} for i in range(len(runs))]
