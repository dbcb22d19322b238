"""MeritFed: weights on the simplex that minimise the target's loss, found by mirror descent in every round."""

from __future__ import annotations

import math
import numbers
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from fedalign.errors import FedalignError
from fedalign.rules.rule import MatchOn
from fedalign.rules.weighing import Weighed, WeighingRule

if TYPE_CHECKING:
    from fedalign.protocol.messages import Request
    from fedalign.protocol.trial import Trial

_AWAY = 0.05  # how far a model is moved towards a client's model to measure a slope
_LARGEST = 50.0  # exponents beyond this change nothing any more
_FLOOR = 1e-6  # the smallest weight that is carried over: a client whose data change can come back


@dataclass(frozen=True)
class MeritFed(WeighingRule):
    """Weigh all clients so that the priority clients' held-out loss of the weighted mean is lowest.

    Tupitsa, Horváth, Takáč and Gorbunov, "Federated Learning Can Find Friends That Are Advantageous" (2024,
    arXiv:2402.05050). The target are the priority clients together, and their held-out data are the paper's extra
    validation data. ``steps`` steps of mirror descent with the entropy, each of size ``rate``, multiply the weights by
    ``exp(−rate · ∂F/∂w_k)``. They start from the weights of the round before, and from equal weights in the first one.

    Choices where the paper leaves room:

    - The paper combines gradients of one batch; here updates are those of a round's local work.
    - The paper's code takes one step with all validation data, or ten with a batch of them. Here it is three with all;
      ten with a third of the rate come to about the same.
    - Slopes are differences of losses, as in the paper's zeroth-order variant, so that priority clients send no
      gradients: the mean is moved towards each client's model in turn. A step costs a model for every client.
    - A weight grows by a factor of at most ``exp(rate)`` in a step, relative to the median client's. One huge update
      then cannot make the slopes of all others meaningless.
    - A client keeps a weight of at least one in a million for the next round's start.

    >>> MeritFed(steps=0)
    Traceback (most recent call last):
    fedalign.errors.FedalignError: MeritFed's steps must be a whole number of at least 1, not 0
    """

    steps: int = 3
    rate: float = 1.0
    match_on: MatchOn | None = None

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, numbers.Integral) or self.steps < 1:
            raise FedalignError(f"MeritFed's steps must be a whole number of at least 1, not {self.steps!r}")
        number = isinstance(self.rate, numbers.Real) and not isinstance(self.rate, bool)
        if not number or not 0 < self.rate < math.inf:
            raise FedalignError(f"MeritFed's rate must be a number above 0, not {self.rate!r}")

    def weigh(self, trial: Trial) -> Generator[Request, Any, Weighed]:
        """Move the weights of the round before down the slopes of the priority clients' loss."""
        clients = trial.clients
        known = {int(k): weight for k, weight in trial.memory.get("weights", {}).items()}
        usual = math.fsum(known.values()) / len(known) if known else 1.0
        weights = normalised({k: known.get(k, usual) for k in clients})
        for _ in range(self.steps):
            mean = trial.mean(weights)
            moved = [mean * (1 - _AWAY) + trial.models[k] * _AWAY for k in clients]
            losses = yield from trial.losses(moved)
            weights = mirror_step(weights, dict(zip(clients, slopes(losses, _AWAY), strict=True)), self.rate)
        kept = normalised({**known, **{k: max(weight, _FLOOR) for k, weight in weights.items()}})
        reasons = {k: f"weight {weight:.3g} of 1" for k, weight in weights.items()}
        return Weighed(weights, reasons, {"weights": {str(k): weight for k, weight in kept.items()}})


def slopes(losses: Sequence[float], away: float) -> list[float]:
    """Return how steeply a loss changes towards each client, relative to the median client.

    ``losses`` are those after a step of length ``away`` towards each. An infinite loss gives an infinite slope; if most
    losses are infinite, the others' slopes are 0.

    >>> [round(slope, 6) for slope in slopes([1.0, 1.2, math.inf], 0.1)]
    [-2.0, 0.0, inf]
    """
    middle = median(losses)
    if not math.isfinite(middle):
        return [0.0 if math.isfinite(loss) else math.inf for loss in losses]
    return [(loss - middle) / away for loss in losses]


def mirror_step(weights: Mapping[int, float], slope: Mapping[int, float], rate: float) -> dict[int, float]:
    """Take a step of mirror descent with the entropy; the result is on the simplex whatever the slopes are.

    >>> mirror_step({0: 0.5, 1: 0.5}, {0: 0.0, 1: math.inf}, rate=1.0)[1] < 1e-20
    True
    """
    exponents = {k: max(-_LARGEST, min(-rate * slope[k], rate)) for k in weights}
    return normalised({k: weight * math.exp(exponents[k]) for k, weight in weights.items()})


def normalised(weights: Mapping[int, float]) -> dict[int, float]:
    """Divide weights by their sum; equal weights if the sum is 0.

    >>> normalised({0: 3.0, 4: 1.0})
    {0: 0.75, 4: 0.25}
    """
    total = math.fsum(weights.values())
    return {k: weight / total if total > 0 else 1 / len(weights) for k, weight in weights.items()}
