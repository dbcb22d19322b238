"""FedFomo, for the priority clients' objective: weights by how much loss a client's model saves, per length."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedalign.rules.rule import MatchOn
from fedalign.rules.weighing import Weighed, WeighingRule

if TYPE_CHECKING:
    from fedalign.protocol.messages import Request
    from fedalign.protocol.trial import Trial


@dataclass(frozen=True)
class FedFomo(WeighingRule):
    """Weigh each client by ``max(0, F(w) − F(w_k)) / ‖w_k − w‖``, measured by the priority clients.

    Zhang, Sapra, Fidler, Yeung and Alvarez, "Personalized Federated Learning with First Order Model Optimization"
    (2021, arXiv:2012.08565). The paper gives each client a model of its own, combined for that client's validation
    data. Here there is one model, for the priority clients together and their held-out data.

    Choices where the paper leaves room:

    - All models are measured; the paper's sampling of models to download saves communication only.
    - If no client's model alone is better than the one before the round, the paper keeps that model, and training would
      stall. Here the aggregate is then FedAvg's on the priority clients.

    >>> FedFomo().evaluates
    True
    """

    match_on: MatchOn | None = None

    def weigh(self, trial: Trial) -> Generator[Request, Any, Weighed]:
        """Measure every client's model and the received one."""
        clients = [k for k in trial.clients if trial.length(k) > 0]
        losses = yield from trial.losses([trial.received, *(trial.models[k] for k in clients)])
        saved = {k: saving(losses[0], loss) for k, loss in zip(clients, losses[1:], strict=True)}
        reasons = {k: f"its model changes the priority clients' loss by {-change:+.3g}" for k, change in saved.items()}
        return Weighed({k: max(0.0, change) / trial.length(k) for k, change in saved.items()}, reasons)


def saving(before: float, after: float) -> float:
    """Return how much loss is saved; minus infinity if either loss is not finite.

    >>> saving(1.0, 0.75), saving(1.0, math.inf)
    (0.25, -inf)
    """
    return before - after if math.isfinite(before) and math.isfinite(after) else -math.inf
