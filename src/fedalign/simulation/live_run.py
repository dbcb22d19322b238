"""A simulated run under way: its generator, its clients' data, and the updates that wait for the server."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedalign.aggregation.aggregator import Aggregator, WeightedMean
from fedalign.aggregation.update_steps import ClientStep, ServerStep, UpdateContext, sent_model
from fedalign.attacks.hostile import HostileClients
from fedalign.callbacks import Stopped
from fedalign.data.federation import Federation, Rows
from fedalign.data.samples import Pool
from fedalign.errors import DivergedError
from fedalign.protocol.messages import (
    Declined,
    Invite,
    Offered,
    Present,
    Reply,
    Request,
    Result,
    RoundDone,
    Run,
    Snapshot,
    WhoIsThere,
)
from fedalign.protocol.records import History, RoundRecord
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Measure, Split
from fedalign.simulation.engine.jobs import Trained, TrainJob
from fedalign.simulation.metrics import RunMetrics
from fedalign.simulation.scaffold import Controls
from fedalign.training.optimizer import LocalOptimizer
from fedalign.training.participation import Full, Participation, draw_for


@dataclass
class LiveRun:
    """A run under way. Clients of an invitation are trained when the server asks for their updates."""

    run: Run
    federation: Federation
    local: LocalOptimizer
    seed: int
    rounds: int
    trainable: int  #: how many numbers of a flat model are trainable, the first ones
    participation: Participation = Full()
    aggregator: Aggregator = field(default_factory=WeightedMean)
    client_steps: Sequence[ClientStep] = ()
    server_steps: Sequence[ServerStep] = ()
    controls: Controls | None = None  #: SCAFFOLD's
    roster: Roster | None = None  #: the federation's, with the caps of this run; None: without caps
    hostile: HostileClients | None = None
    measure_every: int = 1  #: in every so many rounds, and in the last ten, the served model is tested
    metrics: RunMetrics | None = None
    request: Request | None = None
    result: Result | None = None
    error: DivergedError | None = None
    stopped: Stopped | None = None  #: set by callbacks: the run ends with the round that is done
    records: list[RoundRecord] = field(default_factory=list)
    round: int = 0
    received: torch.Tensor | None = None  #: the model that the invited clients have
    kept: dict[int, Trained] = field(default_factory=dict)  #: updates that were compared and wait for the aggregate

    def advance(self, reply: Any) -> None:
        """Send a reply and keep the next request; at the end keep the result, or the error."""
        if self.stopped is not None:
            done = self.request
            assert isinstance(done, RoundDone), "a run is stopped after a round"
            self.run.close()
            self.request, self.result = None, Result(done.model, History(self.records))
            return
        try:
            self.request = self.run.send(reply)
        except StopIteration as stop:
            self.request, self.result = None, stop.value
        except DivergedError as error:
            self.request, self.error = None, error

    def measure(self) -> None:
        """Add the users' metrics of the served model to the record of the round that is done."""
        if self.metrics is not None and isinstance(self.request, RoundDone):
            record = replace(self.request.record, metrics=self.metrics.of(self.request.model))
            self.request = replace(self.request, record=record)

    def present(self, request: WhoIsThere) -> Present | None:
        """Draw the clients that can be reached, or those that evaluate; None: no evaluators of their own."""
        self.round = request.round
        roster = self.roster or self.federation.roster
        drawn = draw_for(self.participation, request.purpose, request.round, roster, self.seed)
        return None if drawn is None else Present(roster, drawn.reachable, drawn.draws)

    def is_tested(self) -> bool:
        """Say whether the model that this round serves is measured on test data."""
        return self.round % self.measure_every == 0 or self.round >= self.rounds - 10

    def job(self, k: int, model: torch.Tensor | None = None) -> TrainJob:
        """Describe client k's local work in this round, from the model it received or from its own."""
        start = self.received if model is None else model
        assert start is not None, "a client trains after an invitation"
        pool, rows = self.data(k, "train")
        return TrainJob(
            model=start,
            pool=pool,
            rows=rows,
            local=self.local,
            seed=self.seed,
            round=self.round,
            rounds=self.rounds,
            client=k,
            correction=self.controls.correction(k) if self.controls is not None else None,
        )

    def data(self, k: int, split: Split) -> tuple[Pool, Rows]:
        """Return the pool and the rows that client k measures or trains on in this round."""
        if self.hostile is not None:
            return self.hostile.data(k, split, self.round)
        return self.federation.pool, self.federation.clients[k].rows(split)

    def reply(self, request: Invite, k: int, own: Measure | None) -> Reply:
        """Answer an invitation as client k does; ``own`` is a free client's measure, None a priority client's."""
        if own is None:
            return Offered()
        if self.hostile is not None and self.hostile.active(k, self.round):
            claimed = self.hostile.report(own, request.broadcast)
            if claimed is not None:
                return Offered(claimed)
        return Offered(own) if request.rule.offers(own, request.broadcast) else Declined(own)

    @property
    def crafts(self) -> bool:
        """Whether hostile clients change their updates in this round."""
        return self.hostile is not None and self.hostile.crafts(self.round)

    def crafted(self, trained: Mapping[int, Trained]) -> dict[int, Trained]:
        """Put what hostile clients send in the place of what they trained."""
        if self.hostile is None or not self.crafts:
            return dict(trained)
        assert self.received is not None
        models = {k: one.model for k, one in trained.items()}
        sent = self.hostile.craft(models, self.received, self.trainable, self.round)
        return {
            k: replace(one, model=sent[k], finite=torch.isfinite(sent[k]).all()) if k in sent else one
            for k, one in trained.items()
        }

    def sent(self, k: int, trained: Trained) -> Trained:
        """Apply the client steps to what client k trained; a hostile client leaves them out."""
        if not self.client_steps or (self.hostile is not None and self.hostile.active(k, self.round)):
            return trained
        assert self.received is not None
        context = UpdateContext(self.seed, self.round, k)
        model = sent_model(trained.model, self.received, self.client_steps, context, self.trainable)
        return replace(trained, model=model, finite=torch.isfinite(model).all())

    def update(self, k: int) -> torch.Tensor:
        """Return the trainable part of an update that was kept."""
        assert self.received is not None
        return (self.kept[k].model - self.received)[: self.trainable]

    def renew_controls(self, trained: Mapping[int, torch.Tensor], shares: Mapping[int, float]) -> None:
        """Renew the control variates of clients and server after a round (SCAFFOLD)."""
        if self.controls is None or self.received is None:
            return
        clients = self.federation.clients
        sizes = {k: len(clients[k].train) for k in trained}
        rates = {k: self.local.total_rate(self.round, self.rounds, samples) for k, samples in sizes.items()}
        weight = math.fsum(float(self.federation.p[k]) for k in shares if clients[k].priority)
        self.controls.renew(self.received, trained, shares, rates, weight)

    def in_order(self, clients: Iterable[int]) -> list[int]:
        """Sort clients as the engines finish them, so that sums round alike whatever else is trained."""
        sizes = {k: len(self.federation.clients[k].train) for k in clients}
        return sorted(sizes, key=lambda k: (-self.local.width_for(sizes[k]), -self.local.steps_for(sizes[k]), k))

    def complete(self, done: RoundDone) -> RoundDone:
        """Add to a round's snapshot what the driver keeps for the run."""
        if self.controls is None:
            return done
        snapshot = done.snapshot
        tensors = {**snapshot.tensors, **self.controls.named()}
        return replace(done, snapshot=Snapshot(snapshot.round, tensors, snapshot.values))
