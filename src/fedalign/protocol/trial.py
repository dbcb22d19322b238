"""What a rule may try before it weighs the clients of a round: aggregates that the priority clients measure."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedalign.protocol.aggregate import shares, weighted_mean
from fedalign.protocol.messages import Evaluate, Measures, Model, Request
from fedalign.protocol.plan import Plan
from fedalign.protocol.round_log import RoundLog
from fedalign.training.server import ServerModel


@dataclass(frozen=True)
class Trial:
    """One round's clients with the models that they sent, and the evaluators to measure any mean of them.

    ``models`` holds the models of the priority clients and of the free clients that may be weighed; all have passed the
    server's checks. ``memory`` is what the rule kept from the round before.
    """

    plan: Plan
    log: RoundLog
    before: ServerModel
    evaluators: tuple[int, ...]
    models: Mapping[int, Model]
    memory: Mapping[str, Any] = field(default_factory=dict)

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients to weigh, by number."""
        return tuple(sorted(self.models))

    @property
    def received(self) -> Model:
        """The model that the clients received."""
        return self.before.weights

    def length(self, client: int) -> float:
        """Return the length of a client's update, as a multiple of the priority clients' mean update's."""
        return self.log.similarities[client].length

    def client_loss(self, client: int) -> float:
        """Return a client's own measure of the model that it received; a free client may have lied."""
        measure = self.log.measures.get(client)
        return math.nan if measure is None else measure.loss

    def priority_only(self) -> dict[int, float]:
        """Return the weights of FedAvg on the priority clients."""
        return shares(self.log.present, self.log.trained)

    def mean(self, weights: Mapping[int, float]) -> Model:
        """Return the weighted mean of the clients' models; the weights sum to 1."""
        used = {k: weight for k, weight in weights.items() if weight > 0}
        return sum(self.models[k] * weight for k, weight in used.items())

    def losses(self, models: Sequence[Model]) -> Generator[Request, Any, list[float]]:
        """Let the evaluators measure models as they would be served, and return their mean losses.

        An evaluator that did not measure every model is left out, so that none is favoured. A loss that is not finite,
        or that nobody measured, is infinity.
        """
        served = [self.before.step(model, self.plan.server).weights for model in models]
        asked = tuple((model, self.evaluators) for model in served)
        answers: list[Measures] = yield Evaluate(asked, self.plan.evaluate_on)
        self.log.sent_down(len(served) * len(self.evaluators))
        complete = [k for k in self.evaluators if all(k in of_model for of_model in answers)]
        if not complete:
            return [math.inf] * len(models)
        means = [weighted_mean(self.log.roster, {k: of_model[k] for k in complete})[0] for of_model in answers]
        return [loss if math.isfinite(loss) else math.inf for loss in means]

    def own_losses(self, clients: Iterable[int]) -> Generator[Request, Any, dict[int, float]]:
        """Let clients measure, on their own data, the model that they sent themselves; those that answer are there."""
        asked = tuple(clients)
        if not asked:
            return {}
        answers: list[Measures] = yield Evaluate(tuple((self.models[k], (k,)) for k in asked), self.plan.match_on)
        self.log.sent_down(len(asked))
        return {k: of_model[k].loss for k, of_model in zip(asked, answers, strict=True) if k in of_model}
