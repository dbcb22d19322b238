"""FedGreed: the clients with the best models on trusted data, as long as their mean gets better."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fedalign.rules.rule import MatchOn
from fedalign.rules.weighing import Weighed, WeighingRule

if TYPE_CHECKING:
    from fedalign.protocol.messages import Request
    from fedalign.protocol.trial import Trial


@dataclass(frozen=True)
class FedGreed(WeighingRule):
    """Order clients by the priority clients' loss of their models, and average the first ones while the loss falls.

    Kritharakis, Makris, Jakovetic and Tserpes, "FedGreed: A Byzantine-Robust Loss-Based Aggregation Method for
    Federated Learning" (2025, arXiv:2508.18060). The server's trusted data are the priority clients' held-out data. The
    best single model begins. The next best one joins, all with the same weight, until one does not lower the loss.

    Choices where the paper leaves room:

    - Priority clients are ordered with the others, so the aggregate may be without some of them.
    - The priority clients measure all means at once, also those after the first that does not lower the loss. This
      costs models, and saves exchanges.

    >>> FedGreed().algorithm
    'weighing'
    """

    match_on: MatchOn | None = None

    def weigh(self, trial: Trial) -> Generator[Request, Any, Weighed]:
        """Measure every single model, then the means of the best 1, 2, 3, … clients."""
        clients = trial.clients
        single = dict(zip(clients, (yield from trial.losses([trial.models[k] for k in clients])), strict=True))
        best = sorted((k for k in clients if math.isfinite(single[k])), key=lambda k: (single[k], k))
        total, means = 0.0, []
        for number, k in enumerate(best, 1):
            total = trial.models[k] + total
            means.append(total * (1 / number))
        losses = (yield from trial.losses(means[1:])) if means[1:] else []
        chosen = best[: falling([single[k] for k in best[:1]] + losses)]
        reasons = {
            k: f"loss {loss:.4g} with its model, {'among' if k in chosen else 'not among'} the best {len(chosen)}"
            for k, loss in single.items()
        }
        return Weighed(dict.fromkeys(chosen, 1.0), reasons)


def falling(losses: Sequence[float]) -> int:
    """Return how many of the first losses fall, each below the one before it.

    >>> falling([3.0, 2.0, 1.5, 1.6, 1.0])
    3
    """
    return next((i for i, (before, after) in enumerate(pairwise(losses), 1) if not after < before), len(losses))
