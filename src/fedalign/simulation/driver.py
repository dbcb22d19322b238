"""Answers the requests of simulated runs in process. Runs advance together, round by round, and share batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedalign.aggregation.aggregator import Aggregation, clients_of
from fedalign.aggregation.buffer_checks import BufferReader
from fedalign.aggregation.cosines import update_cosines
from fedalign.aggregation.resemblance import resemblances
from fedalign.errors import DivergedError, FedalignError
from fedalign.protocol.messages import (
    Aggregate,
    Aggregated,
    Compare,
    Compared,
    Cosines,
    Evaluate,
    Invite,
    Paired,
    Resemble,
    RoundDone,
    TrainAlone,
    WhoIsThere,
)
from fedalign.rules.rule import Measure, Similarity
from fedalign.simulation.collected_checks import CollectedChecks, read_flags
from fedalign.simulation.engine.jobs import Engine, EvalJob, Trained, TrainJob
from fedalign.simulation.engine.pairs import PairJob
from fedalign.simulation.live_run import LiveRun

#: What happened to a run (by its index): a round is done, or training diverged.
Event = tuple[int, RoundDone | DivergedError]


@dataclass
class Driver:
    """Drives runs to their ends."""

    engine: Engine
    runs: Sequence[LiveRun]

    def __post_init__(self) -> None:
        self._told: set[int] = set()
        self._buffers = BufferReader(self.engine.layout)

    def drive(self) -> Iterator[list[Event]]:
        """Answer until every run has ended; after each round give what happened, the diverged runs first.

        All runs finish a round before any begins the next. So the batches that clients share, and with them the
        last bits of every result, are those of an uninterrupted run also after a resume.
        """
        for run in self.runs:
            run.advance(None)
        answers: dict[type, Callable[[Sequence[LiveRun]], None]] = {
            WhoIsThere: self._who_is_there,
            Evaluate: self._evaluate,
            Paired: self._paired,
            Invite: self._invite,
            TrainAlone: self._train_alone,
            Compare: self._compare,
            Resemble: self._resemble,
            Cosines: self._cosines,
            Aggregate: self._aggregate,
        }
        while waiting := [run for run in self.runs if run.request is not None]:
            for kind, answer in answers.items():
                asking = [run for run in waiting if isinstance(run.request, kind)]
                if asking:
                    answer(asking)
                    break
            else:
                self._measure_attacks(waiting)
                for run in waiting:
                    run.measure()
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
                events.append((index, run.complete(run.request)))
        return events

    def _measure_attacks(self, runs: Sequence[LiveRun]) -> None:
        """Measure how often the models that are served now fall for the attackers' trigger."""
        stamped = [(run, run.request, run.hostile.stamped) for run in runs if run.hostile is not None]
        asked = [
            (run, done, pool)
            for run, done, pool in stamped
            if isinstance(done, RoundDone) and pool is not None and not isinstance(done.model, tuple)  # one a client
        ]
        jobs = [EvalJob(done.model, pool, np.arange(len(pool.y))) for _, done, pool in asked]
        for (run, done, _), measure in zip(asked, self.engine.evaluate(jobs), strict=True):
            run.request = replace(done, record=replace(done.record, attack_success=measure.accuracy))

    def _who_is_there(self, runs: Sequence[LiveRun]) -> None:
        for run in runs:
            assert isinstance(run.request, WhoIsThere)
            run.advance(run.present(run.request))

    def _evaluate(self, runs: Sequence[LiveRun]) -> None:
        asked = [(run, run.request) for run in runs if isinstance(run.request, Evaluate)]
        jobs, places = [], []
        for i, (run, request) in enumerate(asked):
            if request.split == "test" and not run.is_tested():
                continue
            for m, (model, clients) in enumerate(request.asked):
                for k in clients:
                    rows = run.federation.clients[k].rows(request.split)
                    if len(rows):
                        jobs.append(EvalJob(model, run.federation.pool, rows, request.tempered, request.quick))
                        places.append((i, m, k))
        replies: list[list[dict[int, Measure]]] = [[{} for _ in request.asked] for _, request in asked]
        for (i, m, k), measure in zip(places, self.engine.evaluate(jobs), strict=True):
            replies[i][m][k] = measure
        for (run, _), reply in zip(asked, replies, strict=True):
            run.advance(reply)

    def _paired(self, runs: Sequence[LiveRun]) -> None:
        asked = [(run, run.request) for run in runs if isinstance(run.request, Paired)]
        jobs = []
        for run, request in asked:
            rows = {k: run.federation.clients[k].rows(request.split) for k in request.clients}
            jobs.append(PairJob(request.models, run.federation.pool, rows))
        for (run, _), reply in zip(asked, self.engine.pairs.compare(jobs), strict=True):
            run.advance(reply)

    def _invite(self, runs: Sequence[LiveRun]) -> None:
        """Let free clients measure the model and decide. Nobody trains yet."""
        asked = [(run, run.request) for run in runs if isinstance(run.request, Invite)]
        jobs, places = [], []
        for i, (run, request) in enumerate(asked):
            run.received, run.kept, run.round = request.model, {}, request.broadcast.round
            for k in request.clients:
                if not run.federation.clients[k].priority:
                    jobs.append(EvalJob(request.model, *run.data(k, request.split)))
                    places.append((i, k))
        own = dict(zip(places, self.engine.evaluate(jobs), strict=True))
        for i, (run, request) in enumerate(asked):
            run.advance({k: run.reply(request, k, own.get((i, k))) for k in request.clients})

    def _train_alone(self, runs: Sequence[LiveRun]) -> None:
        asked = [(run, run.request) for run in runs if isinstance(run.request, TrainAlone)]
        jobs: list[TrainJob] = []
        places: list[tuple[int, int]] = []
        for i, (run, request) in enumerate(asked):
            run.round = request.round
            for k, model in request.models.items():
                jobs.append(run.job(k, model))
                places.append((i, k))
        done = {places[trained.job]: trained for trained in self.engine.train(jobs)}
        finite = dict(zip(done, read_flags([trained.finite for trained in done.values()]), strict=True))
        for i, (run, request) in enumerate(asked):
            run.advance({k: done[i, k].model if finite[i, k] else None for k in request.models})

    def _compare(self, runs: Sequence[LiveRun]) -> None:
        """Train every client that sent an update, keep the models, check them, and compare the updates."""
        asked = [(run, run.request) for run in runs if isinstance(run.request, Compare)]
        places = [(run, k) for run, request in asked for k in run.in_order(request.clients)]
        for trained in self.engine.train([run.job(k) for run, k in places]):
            run, k = places[trained.job]
            run.kept[k] = run.sent(k, trained)
        for run, _ in asked:
            run.kept = run.crafted(run.kept)
        checks = CollectedChecks([run for run, _ in asked], self._buffers)
        for i, (run, _) in enumerate(asked):
            for k, trained in run.kept.items():
                checks.add(i, k, trained)
        for (run, request), refused in zip(asked, checks.refusals(), strict=True):
            for k in refused:
                del run.kept[k]
            kept = [k for k in request.clients if k in run.kept]
            trusted = request.reference.keys() <= run.kept.keys()  # else the run has diverged
            similarities = similarities_to(run.update, request.reference, kept) if trusted else {}
            run.advance(Compared(similarities, refused))

    def _resemble(self, runs: Sequence[LiveRun]) -> None:
        """Compare updates that were kept with each other."""
        size = self.engine.layout.trainable_size
        for run in runs:
            assert isinstance(run.request, Resemble)
            assert run.received is not None
            models = {k: trained.model for k, trained in run.kept.items()}
            run.advance(resemblances(run.request.mix, models, run.received, size))

    def _cosines(self, runs: Sequence[LiveRun]) -> None:
        """Compare updates that were kept with each other and with the server's last step."""
        size = self.engine.layout.trainable_size
        for run in runs:
            asked = run.request
            assert isinstance(asked, Cosines)
            assert run.received is not None
            models = {k: run.kept[k].model for k in asked.clients}
            run.advance(update_cosines(asked.clients, models, run.received, asked.previous, size))

    def _aggregate(self, runs: Sequence[LiveRun]) -> None:
        """Train every client that is in some mix, and add its model up as soon as it is there.

        The checks need the priority clients' updates first. So all are added, and if one turns out to be refused, the
        aggregate is dropped and the algorithm asks again; clients are then trained again, to the same bits.
        """
        asked = [(run, run.request) for run in runs if isinstance(run.request, Aggregate)]
        for run, request in asked:
            if run.controls is not None and len(request.mixes) > 1:
                raise FedalignError(
                    "SCAFFOLD cannot be combined with a rule of several candidates, which does not fix in advance "
                    "whose updates are used"
                )
        size = self.engine.layout.trainable_size
        totals = [
            Aggregation(run.aggregator, request.mixes, size, seed=run.seed, round=run.round) for run, request in asked
        ]
        controlled: list[dict[int, torch.Tensor]] = [{} for _ in asked]
        checks = CollectedChecks([run for run, _ in asked], self._buffers)
        for i, k, trained in self._trained(asked):
            run = asked[i][0]
            assert run.received is not None
            totals[i].add(k, trained.model, run.received)
            if run.controls is not None:
                controlled[i][k] = trained.model
            checks.add(i, k, trained)
        for i, ((run, request), refused) in enumerate(zip(asked, checks.refusals(), strict=True)):
            if refused:
                run.kept = {k: trained for k, trained in run.kept.items() if k not in refused}
                run.advance(Aggregated(refused=refused))
            else:
                run.kept = run.kept if request.again else {}
                run.renew_controls(controlled[i], request.mixes[0].shares)
                run.advance(Aggregated(totals[i].results()))

    def _trained(self, asked: Sequence[tuple[LiveRun, Aggregate]]) -> Iterator[tuple[int, int, Trained]]:
        """Give, for each run, the clients of its mixes with their models: kept ones, and others as they are trained."""
        wanted = [run.in_order(clients_of(request.mixes)) for run, request in asked]
        for i, (run, _) in enumerate(asked):
            yield from ((i, k, run.kept[k]) for k in wanted[i] if k in run.kept)
        places = [(i, k) for i, (run, _) in enumerate(asked) for k in wanted[i] if k not in run.kept]
        held: dict[int, dict[int, Trained]] = {}  # attackers may shape what they send by the honest updates
        for trained in self.engine.train([asked[i][0].job(k) for i, k in places]):
            i, k = places[trained.job]
            run = asked[i][0]
            if run.crafts:
                held.setdefault(i, {})[k] = run.sent(k, trained)
            else:
                yield i, k, run.sent(k, trained)
        for i, models in held.items():
            yield from ((i, k, trained) for k, trained in asked[i][0].crafted(models).items())


def similarities_to(
    update: Callable[[int], torch.Tensor], reference: Mapping[int, float], clients: Iterable[int]
) -> dict[int, Similarity]:
    """Compare clients' updates, one after another, with a weighted mean of some of them."""
    asked = list(clients)
    mean = torch.stack([update(k).double() * weight for k, weight in reference.items()]).sum(0)
    each = (update(k).double() for k in asked)
    dots = torch.stack([torch.stack([one @ mean, one @ one]) for one in each]).tolist()
    length = math.sqrt(float(mean @ mean))
    return {k: _similarity(dot, square, length) for k, (dot, square) in zip(asked, dots, strict=True)}


def _similarity(dot: float, square: float, length: float) -> Similarity:
    own = math.sqrt(square) if square >= 0 else math.nan
    if own == 0 or length == 0:
        return Similarity(0.0, 0.0)
    return Similarity(dot / (own * length), own / length)
