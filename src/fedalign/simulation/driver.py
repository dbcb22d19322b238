"""Answers the protocol's requests in process. Runs advance together, round by round, and share batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedalign.errors import DivergedError
from fedalign.federation import Federation
from fedalign.history import RoundRecord
from fedalign.local import LocalSGD
from fedalign.protocol import Declined, Evaluate, Reply, Request, Result, RoundDone, Run, Train, Update
from fedalign.rules import Measure
from fedalign.simulation.jobs import Engine, EvalJob, TrainJob


@dataclass
class LiveRun:
    """A run under way: its generator, and the data and local work that answer it."""

    run: Run
    federation: Federation
    local: LocalSGD
    seed: int
    rounds: int
    request: Request | None = None
    result: Result | None = None
    error: DivergedError | None = None
    records: list[RoundRecord] = field(default_factory=list)

    def advance(self, reply: Any) -> None:
        """Send a reply and keep the next request; at the end keep the result, or why there is none."""
        try:
            self.request = self.run.send(reply)
        except StopIteration as stop:
            self.request, self.result = None, stop.value
        except DivergedError as error:
            self.request, self.error = None, error


@dataclass
class Driver:
    """Drives runs to their ends. ``on_round`` is called for each run at the end of each of its rounds."""

    engine: Engine
    runs: Sequence[LiveRun]
    on_round: Callable[[int, RoundDone], None] = field(default=lambda index, done: None)
    on_diverged: Callable[[int, DivergedError], None] = field(default=lambda index, error: None)

    def __post_init__(self) -> None:
        self._told: set[int] = set()

    def drive(self) -> None:
        """Answer until every run has ended.

        All runs finish a round before any begins the next. So the batches that clients share, and with them the
        last bits of every result, are those of an uninterrupted run also after a resume.
        """
        for run in self.runs:
            run.advance(None)
        while waiting := [run for run in self.runs if run.request is not None]:
            evaluations = [run for run in waiting if isinstance(run.request, Evaluate)]
            trainings = [run for run in waiting if isinstance(run.request, Train)]
            if evaluations:
                self._evaluate(evaluations)
            elif trainings:
                self._train(trainings)
            else:
                self._close_round()
                for run in waiting:
                    run.advance(None)
        self._close_round()

    def _close_round(self) -> None:
        """Tell of the runs that diverged in this round, then of the finished rounds of the others."""
        for index, run in enumerate(self.runs):
            if run.error is not None and index not in self._told:
                self._told.add(index)
                self.on_diverged(index, run.error)
        for index, run in enumerate(self.runs):
            if isinstance(run.request, RoundDone):
                run.records.append(run.request.record)
                self.on_round(index, run.request)

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
        asked = [(run, run.request) for run in runs if isinstance(run.request, Train)]
        own = self._free_clients_measures(asked)
        jobs: list[TrainJob] = []
        for i, (run, request) in enumerate(asked):
            for model, k in request.jobs:
                if _will_count(request, own.get((i, k))):
                    client = run.federation.clients[k]
                    jobs.append(
                        TrainJob(
                            model,
                            run.federation.pool,
                            client.train,
                            run.local,
                            run.seed,
                            request.round,
                            run.rounds,
                            k,
                        )
                    )
        trained = iter(self.engine.train(jobs))
        for i, (run, request) in enumerate(asked):
            replies: list[Reply] = []
            for _, k in request.jobs:
                measure = own.get((i, k))
                if _will_count(request, measure):
                    result = next(trained)
                    replies.append(Update(result.model, measure, result.finite))
                elif measure is not None and _offers(request, measure):
                    replies.append(Update(None, measure))
                elif measure is not None:
                    replies.append(Declined(measure))
            run.advance(replies)

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


def _offers(request: Train, own: Measure) -> bool:
    return request.rule is None or request.broadcast is None or request.rule.offers(own, request.broadcast)


def _will_count(request: Train, own: Measure | None) -> bool:
    """Whether a client's update will be looked at. One that the server will refuse needs no training here."""
    if own is None or request.rule is None or request.broadcast is None:
        return True
    return request.rule.offers(own, request.broadcast) and request.rule.admits(own, request.broadcast)
