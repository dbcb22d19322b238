"""Answers the protocol's requests in process. Runs advance together, round by round, and share batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fedalign.data.federation import Federation
from fedalign.errors import DivergedError, FedalignError
from fedalign.protocol.messages import (
    Combine,
    Combined,
    Compare,
    Declined,
    Evaluate,
    Reply,
    Request,
    Result,
    RoundDone,
    Run,
    Train,
    Update,
)
from fedalign.protocol.records import RoundRecord
from fedalign.rules.rule import Measure, Similarity
from fedalign.simulation.engine.jobs import Engine, EvalJob, Trained, TrainJob
from fedalign.simulation.scaffold import Controls
from fedalign.training.optimizer import LocalOptimizer

#: Looks at a finished round, and the record before, and gives the record with what it has to add.
Watch = Callable[[RoundDone, RoundRecord | None], RoundRecord]


@dataclass
class LiveRun:
    """A run under way: its generator, and the data and local work that answer it."""

    run: Run
    federation: Federation
    local: LocalOptimizer
    seed: int
    rounds: int
    request: Request | None = None
    result: Result | None = None
    error: DivergedError | None = None
    records: list[RoundRecord] = field(default_factory=list)
    round: int = 0
    received: dict[int, torch.Tensor] = field(default_factory=dict)  # the model each invited client has
    kept: dict[int, Trained] = field(default_factory=dict)  # updates that a rule wanted to see
    controls: Controls | None = None  # SCAFFOLD's
    watch: Watch | None = None
    last: RoundRecord | None = None

    def job(self, k: int) -> TrainJob:
        """Describe client k's local work in this round."""
        return TrainJob(
            model=self.received[k],
            pool=self.federation.pool,
            rows=self.federation.clients[k].train,
            local=self.local,
            seed=self.seed,
            round=self.round,
            rounds=self.rounds,
            client=k,
            correction=self.controls.correction(k) if self.controls is not None else None,
        )

    def update(self, size: int, k: int) -> torch.Tensor:
        """Give the first ``size`` numbers of client k's update, which a rule wanted to see."""
        return (self.kept[k].model - self.received[k])[:size]

    def renew_control(self, k: int, trained: torch.Tensor, share: float) -> None:
        """Renew a client's control variate after its local work (SCAFFOLD)."""
        if self.controls is not None:
            steps = self.local.steps_for(len(self.federation.clients[k].train))
            rates = math.fsum(self.local.rate(self.round, self.rounds, s, steps) for s in range(steps))
            self.controls.update(k, self.received[k] - trained, rates, share)

    def close_controls(self, mix: Mapping[int, float]) -> None:
        """Renew the server's control variate after a round (SCAFFOLD)."""
        if self.controls is not None:
            clients = self.federation.clients
            self.controls.close(math.fsum(float(self.federation.p[k]) for k in mix if clients[k].priority))

    def in_order(self, clients: Iterable[int]) -> list[int]:
        """Sort clients as the engines finish them, whatever else is trained beside: sums then round alike."""
        sizes = {k: len(self.federation.clients[k].train) for k in clients}
        return sorted(sizes, key=lambda k: (-self.local.width_for(sizes[k]), -self.local.steps_for(sizes[k]), k))

    def advance(self, reply: Any) -> None:
        """Send a reply and keep the next request; at the end keep the result, or why there is none."""
        try:
            self.request = self.run.send(reply)
        except StopIteration as stop:
            self.request, self.result = None, stop.value
        except DivergedError as error:
            self.request, self.error = None, error


#: What happened to a run (by its index): a round is done, or training diverged.
Event = tuple[int, RoundDone | DivergedError]


@dataclass
class Driver:
    """Drives runs to their ends."""

    engine: Engine
    runs: Sequence[LiveRun]

    def __post_init__(self) -> None:
        self._told: set[int] = set()

    def drive(self) -> Iterator[list[Event]]:
        """Answer until every run has ended; after each round give what happened, the diverged runs first.

        All runs finish a round before any begins the next. So the batches that clients share, and with them the
        last bits of every result, are those of an uninterrupted run also after a resume.
        """
        for run in self.runs:
            run.advance(None)
        while waiting := [run for run in self.runs if run.request is not None]:
            for kind, answer in (
                (Evaluate, self._evaluate),
                (Train, self._train),
                (Compare, self._compare),
                (Combine, self._combine),
            ):
                asking = [run for run in waiting if isinstance(run.request, kind)]
                if asking:
                    answer(asking)
                    break
            else:
                yield self._events()
                for run in waiting:
                    run.advance(None)
        if last := self._events():
            yield last

    def _events(self) -> list[Event]:
        events: list[Event] = []
        for index, run in enumerate(self.runs):
            if run.error is not None and index not in self._told:
                self._told.add(index)
                events.append((index, run.error))
        for index, run in enumerate(self.runs):
            if isinstance(run.request, RoundDone):
                done = run.request
                if run.watch is not None:
                    done = replace(done, record=run.watch(done, run.last))
                run.last = done.record
                run.records.append(done.record)
                controls = run.controls.rows() if run.controls is not None else ()
                events.append((index, replace(done, memory=(*done.memory, *controls))))
        return events

    def _evaluate(self, runs: Sequence[LiveRun]) -> None:
        asked = [(run, run.request.jobs, run.request.split) for run in runs if isinstance(run.request, Evaluate)]
        jobs = []
        for run, pairs, split in asked:
            for model, k in pairs:
                rows = run.federation.clients[k].rows(split)
                if len(rows):
                    jobs.append(EvalJob(model, run.federation.pool, rows))
        measures = iter(self.engine.evaluate(jobs))
        for run, pairs, split in asked:
            there = [bool(len(run.federation.clients[k].rows(split))) for _, k in pairs]
            run.advance([next(measures) if has_rows else None for has_rows in there])

    def _train(self, runs: Sequence[LiveRun]) -> None:
        """Ask the invited clients. Who sends an update to a server is trained when the server asks for the mean."""
        asked = [(run, run.request) for run in runs if isinstance(run.request, Train)]
        own = self._free_clients_measures(asked)
        now: list[tuple[int, int]] = []
        jobs: list[TrainJob] = []
        for i, (run, request) in enumerate(asked):
            run.received, run.kept = {k: model for model, k in request.jobs}, {}
            run.round = request.round
            if request.broadcast is None:
                now += [(i, k) for _, k in request.jobs]
                jobs += [run.job(k) for _, k in request.jobs]
        done = {now[trained.job]: trained for trained in self.engine.train(jobs)}
        finite = _flags([trained.finite for trained in done.values()])
        updates = {
            where: Update(trained.model, None, ok) for (where, trained), ok in zip(done.items(), finite, strict=True)
        }
        for run, request in asked:
            if request.broadcast is None:
                run.received = {}  # its models are not needed again
        for i, (run, request) in enumerate(asked):
            run.advance([updates.get((i, k)) or _answer(request, own.get((i, k))) for _, k in request.jobs])

    def _compare(self, runs: Sequence[LiveRun]) -> None:
        """Train every client that sent an update, keep the models, and compare the updates with a mean of some."""
        asked = [(run, run.request) for run in runs if isinstance(run.request, Compare)]
        where = [(run, k) for run, request in asked for k in run.in_order(request.clients)]
        for one in self.engine.train([run.job(k) for run, k in where]):
            run, k = where[one.job]
            run.kept[k] = one
        size = self.engine.layout.trainable_size
        for run, request in asked:
            run.advance(similarities(partial(run.update, size), request))

    def _combine(self, runs: Sequence[LiveRun]) -> None:
        """Train every client that is in some mix, and add its model up as soon as it is there."""
        asked = [(run, run.request) for run in runs if isinstance(run.request, Combine)]
        for run, request in asked:
            if run.controls is not None and len(request.mixes) > 1:
                raise FedalignError("SCAFFOLD does not go with a rule of several candidates: whose update counts?")
        sums: list[list[torch.Tensor | None]] = [[None] * len(request.mixes) for _, request in asked]
        size = self.engine.layout.trainable_size
        flags: list[torch.Tensor] = []
        order: list[tuple[int, int]] = []
        for i, k, trained in self._trained(asked):
            order.append((i, k))
            flags.append(trained.finite)
            run, request = asked[i]
            run.renew_control(k, trained.model, request.mixes[0].get(k, 0.0))
            for m, mix in enumerate(request.mixes):
                if k in mix:
                    moved = stretched(trained.model, run.received[k], request.step(m, k), size)
                    _add(sums[i], m, moved * mix[k])
        bad = [place for place, ok in zip(order, _flags(flags), strict=True) if not ok]
        for i, (run, request) in enumerate(asked):
            run.kept = {}
            run.close_controls(request.mixes[0])
            run.advance(Combined(tuple(sums[i]), tuple(sorted(k for at, k in bad if at == i))))

    def _trained(self, asked: Sequence[tuple[LiveRun, Combine]]) -> Iterator[tuple[int, int, Trained]]:
        """Give, for each run, the clients of its mixes with their models: kept ones, and others as they are trained."""
        wanted = [run.in_order({k for mix in request.mixes for k in mix}) for run, request in asked]
        for i, (run, _) in enumerate(asked):
            yield from ((i, k, run.kept[k]) for k in wanted[i] if k in run.kept)
        where = [(i, k) for i, (run, _) in enumerate(asked) for k in wanted[i] if k not in run.kept]
        for one in self.engine.train([asked[i][0].job(k) for i, k in where]):
            yield (*where[one.job], one)

    def _free_clients_measures(self, asked: Sequence[tuple[LiveRun, Train]]) -> dict[tuple[int, int], Measure]:
        """Let every invited free client measure the model it received."""
        where, jobs = [], []
        for i, (run, request) in enumerate(asked):
            if request.rule is None:
                continue
            for model, k in request.jobs:
                client = run.federation.clients[k]
                if not client.priority:
                    where.append((i, k))
                    jobs.append(EvalJob(model, run.federation.pool, client.rows(request.split)))
        return dict(zip(where, self.engine.evaluate(jobs), strict=True))


def stretched(model: torch.Tensor, received: torch.Tensor, step: float, size: int) -> torch.Tensor:
    """Multiply a model's update in its first ``size`` numbers; the rest, BatchNorm's statistics, is as it is."""
    if step == 1.0:
        return model
    moved = model.clone()
    moved[:size] = received[:size] + (model[:size] - received[:size]) * step
    return moved


def similarities(update: Callable[[int], torch.Tensor], request: Compare) -> dict[int, Similarity]:
    """Compare clients' updates, one after another, with the mean of some of them, as a request says."""
    mean = torch.stack([update(k).double() * weight for k, weight in request.reference.items()]).sum(0)
    each = (update(k).double() for k in request.clients)
    dots = torch.stack([torch.stack([one @ mean, one @ one]) for one in each]).tolist()
    length = math.sqrt(float(mean @ mean))
    return {k: _similarity(dot, square, length) for k, (dot, square) in zip(request.clients, dots, strict=True)}


def _similarity(dot: float, square: float, length: float) -> Similarity:
    own = math.sqrt(square) if square >= 0 else math.nan
    if own == 0 or length == 0:
        return Similarity(0.0, 0.0)
    return Similarity(dot / (own * length), own / length)


def _add(sums: list[torch.Tensor | None], place: int, more: torch.Tensor) -> None:
    total = sums[place]
    sums[place] = more if total is None else total.add_(more)


def _answer(request: Train, own: Measure | None) -> Reply:
    """Decide as the client does; ``own`` is a free client's measure, None a priority client's."""
    if own is None or request.rule is None or request.broadcast is None:
        return Update()
    return Update(own=own) if request.rule.offers(own, request.broadcast) else Declined(own)


def _flags(flags: Sequence[torch.Tensor]) -> list[bool]:
    """Read flags, all at once: on a GPU, reading waits for the work."""
    return [bool(flag) for flag in torch.stack(list(flags)).tolist()] if flags else []
