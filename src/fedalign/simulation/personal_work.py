"""Makes the personal models of simulated runs: the requests of all clients are answered together, in large batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedalign.attacks.hostile import HostileClients
from fedalign.data.federation import Federation
from fedalign.errors import FedalignError
from fedalign.personal.local_work import FIRST_PASS, PersonalLocal
from fedalign.personal.method import (
    Exchange,
    Measured,
    PersonalMethod,
    PersonalOutcome,
    PersonalRequest,
    PersonalRun,
    Start,
    Train,
    parts_of,
)
from fedalign.rules.rule import Measure
from fedalign.simulation.engine.jobs import Engine, EvalJob, TrainJob
from fedalign.training.optimizer import LocalOptimizer

_BYTES = 4 << 30  # of models that are worked on at a time
_MODELS = 3  # that a client holds meanwhile: the served one, the best so far, the present one


@dataclass(frozen=True)
class FinishedRun:
    """A run whose clients make personal models of its final model. ``keep``: the models are part of the outcome."""

    federation: Federation
    methods: Mapping[str, PersonalMethod]
    served: torch.Tensor
    initial: torch.Tensor
    local: LocalOptimizer
    seed: int
    rounds: int
    head: str = ""
    hostile: HostileClients | None = None
    keep: bool = False
    number: int = 0  #: of the first client, which fixes what is random for it; on a node there is no other


@dataclass
class _Client:
    """A client at work: its generator, what it asks for, and its personal model when it is done."""

    group: _Group
    k: int
    run: PersonalRun
    request: PersonalRequest | None = None
    outcome: Any = None

    def advance(self, reply: Any) -> None:
        try:
            self.request = self.run.send(reply)
        except StopIteration as stop:
            self.request, self.outcome = None, stop.value


@dataclass
class _Group:
    """The clients of a run that use a method, and the models that they have sent each other so far."""

    of: FinishedRun
    label: str
    local: PersonalLocal
    sent: dict[int, torch.Tensor] = field(default_factory=dict)


def personal_outcomes(engine: Engine, runs: Sequence[FinishedRun]) -> list[dict[str, tuple[PersonalOutcome, ...]]]:
    """Make and measure the personal models of runs: by method, an outcome for every client.

    Methods are worked on one after another where their models would not fit in memory together. The outcome of a
    client does not depend on what else is worked on.
    """
    found: list[dict[str, tuple[PersonalOutcome, ...]]] = [{} for _ in runs]
    units = [(i, label) for i, run in enumerate(runs) for label in run.methods]
    for together in _fitting(engine, runs, units):
        groups = [_Group(runs[i], label, PersonalLocal(runs[i].local, runs[i].rounds)) for i, label in together]
        made = _work(engine, groups)
        for (i, label), outcomes in zip(together, _measured(engine, groups, made), strict=True):
            found[i][label] = outcomes
    return found


def _fitting(
    engine: Engine, runs: Sequence[FinishedRun], units: Sequence[tuple[int, str]]
) -> Iterator[list[tuple[int, str]]]:
    """Cut runs' methods into parts whose models fit in memory."""
    each = _MODELS * engine.layout.size * engine.layout.dtype.itemsize
    part: list[tuple[int, str]] = []
    used = 0
    for i, label in units:
        needed = each * len(runs[i].federation)
        if part and used + needed > _BYTES:
            yield part
            part, used = [], 0
        part.append((i, label))
        used += needed
    if part:
        yield part


def _work(engine: Engine, groups: Sequence[_Group]) -> list[list[Any]]:
    """Drive the generators of all clients to their ends; return their personal models, by group and client."""
    clients = [
        [_Client(g, k, g.of.methods[g.label].personalise(_start(g.of, k))) for k in range(len(g.of.federation))]
        for g in groups
    ]
    everybody = [client for group in clients for client in group]
    for client in everybody:
        client.advance(None)
    while waiting := [client for client in everybody if client.request is not None]:
        if asking := [client for client in waiting if isinstance(client.request, Train)]:
            _train(engine, asking)
        elif asking := [client for client in waiting if isinstance(client.request, Measured)]:
            _measure(engine, asking)
        elif asking := [client for client in waiting if isinstance(client.request, Exchange)]:
            _exchange(engine, asking)  # all others have finished, so nobody waits for a model
        else:
            raise FedalignError(f"a personal method asks for {waiting[0].request!r}, which is no request")
    return [[client.outcome for client in group] for group in clients]


def _start(run: FinishedRun, k: int) -> Start:
    return Start(run.served, run.initial, run.number + k, run.seed, run.head)


def _train(engine: Engine, asking: Sequence[_Client]) -> None:
    jobs = []
    for client in asking:
        request, run = client.request, client.group.of
        assert isinstance(request, Train)
        rows = run.federation.clients[client.k].train
        jobs.append(
            TrainJob(
                model=request.model,
                pool=run.federation.pool,
                rows=rows,
                local=client.group.local(request, len(rows)),
                seed=run.seed,
                round=FIRST_PASS + request.number,
                rounds=run.rounds,
                client=run.number + client.k,
                towards=request.towards,
                only=parts_of(engine.layout.names[: engine.layout.trainable], request.only),
            )
        )
    done = {one.job: one for one in engine.train(jobs)}
    finite = torch.stack([done[j].finite for j in range(len(jobs))]).tolist()
    for j, client in enumerate(asking):
        client.advance(done[j].model if finite[j] else None)


def _measure(engine: Engine, asking: Sequence[_Client]) -> None:
    jobs: list[EvalJob] = []
    for client in asking:
        request, federation = client.request, client.group.of.federation
        assert isinstance(request, Measured)
        rows = federation.clients[client.k].rows(request.split)
        if not len(rows):
            raise FedalignError(f"{client.group.label} needs {request.split} data, and client {client.k} has none")
        jobs += [EvalJob(model, federation.pool, rows) for model in request.models]
    measures = iter(engine.evaluate(jobs))
    for client in asking:
        assert isinstance(client.request, Measured)
        client.advance([next(measures) for _ in client.request.models])


def _exchange(engine: Engine, asking: Sequence[_Client]) -> None:
    """Let clients send their models; what is not finite is not passed on. A hostile client sends what it likes."""
    for client in asking:
        assert isinstance(client.request, Exchange)
        client.group.sent[client.k] = client.request.model
    groups = {id(client.group): client.group for client in asking}
    received = {key: _candidates(engine, group) for key, group in groups.items()}
    for client in asking:
        request, roster = client.request, client.group.of.federation.roster
        assert isinstance(request, Exchange)
        allowed = {"all": (True, False), "priority": (True,), "free": (False,)}[request.senders]
        others = received[id(client.group)].items()
        client.advance({n: model for n, model in others if n != client.k and roster.priority[n] in allowed})


def _candidates(engine: Engine, group: _Group) -> dict[int, torch.Tensor]:
    run, sent = group.of, dict(sorted(group.sent.items()))
    if run.hostile is not None:
        sent |= run.hostile.craft(sent, run.served, engine.layout.trainable_size, run.rounds - 1)
    return {n: model for n, model in sent.items() if bool(torch.isfinite(model).all())}


def _measured(
    engine: Engine, groups: Sequence[_Group], made: Sequence[Sequence[Any]]
) -> list[tuple[PersonalOutcome, ...]]:
    """Measure personal models on the test and held-out data of their clients."""
    jobs: list[EvalJob] = []
    places: list[tuple[int, int, str]] = []
    for i, (group, models) in enumerate(zip(groups, made, strict=True)):
        for k, personal in enumerate(models):
            client = group.of.federation.clients[k]
            for split, rows in (("test", client.test), ("heldout", client.heldout)):
                if len(rows):
                    jobs.append(EvalJob(personal.model, group.of.federation.pool, rows))
                    places.append((i, k, split))
    found: dict[tuple[int, int, str], Measure] = dict(zip(places, engine.evaluate(jobs), strict=True))
    return [
        tuple(
            PersonalOutcome(
                found.get((i, k, "test")),
                found.get((i, k, "heldout")),
                personal.passes,
                personal.model.cpu() if group.of.keep else None,
            )
            for k, personal in enumerate(models)
        )
        for i, (group, models) in enumerate(zip(groups, made, strict=True))
    ]
