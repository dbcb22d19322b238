"""Made-up clients, to test a rule or an algorithm in a few lines: models are plain numbers, and nothing is trained.

>>> from fedalign import Align
>>> from fedalign.protocol.roster import Roster
>>> roster = Roster(("a", "b", "c"), (True, False, False), (30, 20, 10))
>>> clients = MadeUpClients(roster, losses={0: 1.0, 1: 1.1, 2: 9.0}, trained={0: 10.0, 1: 40.0, 2: 0.0})
>>> played = play(Align(epsilon=0.3), clients)
>>> [client.decision for client in played.history[0].clients]
['trained', 'admitted', 'declined']
>>> played.model  # (30 · 10 + 20 · 40) / 50
22.0
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from fedalign.protocol.messages import (
    Aggregate,
    Aggregated,
    Compare,
    Compared,
    Cosines,
    Declined,
    Evaluate,
    Invite,
    Lost,
    Mix,
    Model,
    Offered,
    Outcomes,
    Paired,
    Present,
    Reply,
    Request,
    Resemble,
    RoundDone,
    Run,
    Snapshot,
    TrainAlone,
    WhoIsThere,
)
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import History
from fedalign.protocol.roster import Roster
from fedalign.registry import ALGORITHMS
from fedalign.rules.baselines import Alone, PriorityOnly
from fedalign.rules.rule import Measure, Rule, Similarity
from fedalign.training.participation import Full, Participation


class MadeUpClients:
    """Answers an algorithm's requests with numbers of your choice. Subclass it where numbers are not enough.

    ``losses`` and ``trained`` hold each client's loss, the same for every model, and the model that it sends.
    ``cosines`` is for rules that need updates, ``outcomes`` for algorithms that compare two models sample by sample
    (a client without an entry finds no difference), ``alike`` for those that compare two clients' updates. Clients in
    ``lost`` never answer; updates of those in ``refused`` fail the server's checks.
    """

    def __init__(
        self,
        roster: Roster,
        losses: Mapping[int, float] | None = None,
        trained: Mapping[int, Model] | None = None,
        *,
        cosines: Mapping[int, float] | None = None,
        outcomes: Mapping[int, Outcomes] | None = None,
        alike: Mapping[tuple[int, int], float] | None = None,
        lost: Collection[int] = (),
        refused: Mapping[int, str] | None = None,
        participation: Participation | None = None,
        seed: int = 0,
    ) -> None:
        self.roster = roster
        self._losses, self._trained, self._cosines = losses or {}, trained or {}, cosines or {}
        self._outcomes, self._alike = outcomes or {}, alike or {}
        self._lost, self._refused = lost, refused or {}
        self._participation, self._seed = participation or Full(), seed
        self.received: Model = None  #: the model of the last invitation

    def measure(self, model: Model, client: int, split: str) -> Measure | None:
        """Return a client's measure of a model; None: it does not answer."""
        return None if client in self._lost else Measure(self._losses[client], 0.5, 5)

    def compare(self, models: tuple[Model, Model], client: int, split: str) -> Outcomes | None:
        """Return how two models did on a client's samples; None: it does not answer."""
        return None if client in self._lost else self._outcomes.get(client, Outcomes(0, 0, 5))

    def train(self, model: Model, client: int) -> Model:
        """Return the model that a client sends after training."""
        return self._trained[client]

    def reply(self, request: Invite, client: int) -> Reply:
        """Decide on an invitation, as a client does."""
        if client in self._lost:
            return Lost("no answer")
        if self.roster.priority[client]:
            return Offered()
        own = self.measure(request.model, client, request.split)
        assert own is not None
        return Offered(own) if request.rule.offers(own, request.broadcast) else Declined(own)

    def similarity(self, client: int) -> Similarity:
        """Compare a client's update with the priority clients' mean update."""
        return Similarity(self._cosines.get(client, 1.0), 1.0)

    def resemblances(self, clients: Sequence[int]) -> dict[tuple[int, int], float]:
        """Return the cosine of every two clients' updates less the mean update of all clients."""
        return {pair: self._alike.get(pair, 0.2) for pair in combinations(clients, 2)}

    def cosines(self, request: Cosines) -> dict[tuple[int, int], float]:
        """Return the cosine of every two clients' updates; no two are copies unless ``alike`` says so."""
        return {pair: self._alike.get(pair, 0.2) for pair in combinations(sorted(request.clients), 2)}

    def refusals(self, clients: Collection[int]) -> dict[int, str]:
        """Return the clients whose updates fail the server's checks, with the reasons."""
        return {k: why for k, why in self._refused.items() if k in clients}

    def answer(self, request: Request) -> Any:
        """Answer one request as a driver would."""
        if isinstance(request, WhoIsThere):
            draw = self._participation.draw if request.purpose == "train" else self._participation.draw_evaluators
            drawn = draw(request.round, self.roster, self._seed)
            return None if drawn is None else Present(self.roster, drawn.reachable, drawn.draws)
        if isinstance(request, Evaluate):
            asked = [{k: self.measure(model, k, request.split) for k in clients} for model, clients in request.asked]
            return [{k: measure for k, measure in one.items() if measure is not None} for one in asked]
        if isinstance(request, Paired):
            compared = {k: self.compare(request.models, k, request.split) for k in request.clients}
            return {k: outcomes for k, outcomes in compared.items() if outcomes is not None}
        if isinstance(request, Invite):
            self.received = request.model
            return {k: self.reply(request, k) for k in request.clients}
        if isinstance(request, Compare):
            refused = self.refusals(request.clients)
            return Compared({k: self.similarity(k) for k in request.clients if k not in refused}, refused)
        if isinstance(request, Resemble):
            return self.resemblances(sorted(request.mix.shares))
        if isinstance(request, Cosines):
            return self.cosines(request)
        if isinstance(request, Aggregate):
            return self._aggregate(request)
        if isinstance(request, TrainAlone):
            return {k: self.train(model, k) for k, model in request.models.items()}
        assert isinstance(request, RoundDone)
        return None

    def _aggregate(self, request: Aggregate) -> Aggregated:
        refused = self.refusals({k for mix in request.mixes for k in mix.shares})
        if refused:
            return Aggregated(refused=refused)
        return Aggregated(tuple(self._mean(mix) for mix in request.mixes))

    def _mean(self, mix: Mix) -> Model:
        def moved(client: int) -> Model:
            trained = self.train(self.received, client)
            step = mix.step.get(client)
            return trained if step is None else self.received + (trained - self.received) * step

        return sum(moved(k) * share for k, share in mix.shares.items())


@dataclass(frozen=True)
class Played:
    """A finished run with made-up clients: its final model, its history, and every request in order."""

    model: Model
    history: History
    requests: list[Request]

    @property
    def rounds(self) -> list[RoundDone]:
        """The RoundDone request of every round."""
        return [request for request in self.requests if isinstance(request, RoundDone)]


def play(
    rule: Rule | Alone | Plan,
    clients: MadeUpClients,
    model: Model = 0.0,
    *,
    rounds: int = 1,
    snapshot: Snapshot | None = None,
) -> Played:
    """Run a rule's algorithm with made-up clients, from ``model`` or from a snapshot. A plan may replace the rule."""
    if isinstance(rule, Plan):
        plan, algorithm = rule, rule.rule.algorithm
    else:
        algorithm = rule.algorithm
        plan = Plan(rule if isinstance(rule, Rule) else PriorityOnly(), rounds)
    run: Run = ALGORITHMS.find(algorithm)(plan, snapshot or Snapshot(0, {"model": model}))
    return drive(run, clients)


def drive(run: Run, clients: MadeUpClients) -> Played:
    """Answer a run's requests to its end."""
    requests: list[Request] = []
    reply: Any = None
    while True:
        try:
            request = run.send(reply)
        except StopIteration as stop:
            return Played(stop.value.model, stop.value.history, requests)
        requests.append(request)
        reply = clients.answer(request)
