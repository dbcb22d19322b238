"""FedFomo: every client mixes the models of other clients by what they do on its own held-out data.

Zhang, Sapra, Fidler, Yeung and Alvarez, "Personalized Federated Learning with First Order Model Optimization" (ICLR
2021, arXiv:2012.08565). The weight of candidate n for client k is ``max(0, (L_k(v) − L_k(v_n)) / ‖v_n − v‖)``, and
``v ← v + Σ weight_n·(v_n − v)`` with weights that sum to 1.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedalign.errors import FedalignError
from fedalign.personal.method import Exchange, Measured, Model, PersonalRequest, PersonalRun, Senders, Start, Train
from fedalign.personal.passes import EarlyStopped
from fedalign.training.randomness import Purpose, uniforms


@dataclass(frozen=True)
class PersonalFedFomo(EarlyStopped):
    """Train, get other clients' models as candidates, and move towards those that lower the own held-out loss.

    A client measures at most ``candidates`` models of others in a pass (0: all of them): those that had the largest
    weights so far, and with probability ``explore`` some drawn at random in their place. ``senders`` says whose models
    may be sent to others: all, the priority clients' or the free clients' alone. A candidate counts by what the client
    itself measures, never by what its sender reports.

    >>> PersonalFedFomo(candidates=5).exchanges
    True
    """

    name: ClassVar[str] = "fedfomo"
    exchanges: ClassVar[bool] = True
    patience: int = 5
    candidates: int = 10
    explore: float = 0.3
    senders: Senders = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.candidates
        if isinstance(most, bool) or not isinstance(most, numbers.Integral) or most < 0:
            raise FedalignError(f"{self.label}.candidates must be a whole number of at least 0, not {most!r}")
        if not isinstance(self.explore, numbers.Real) or not 0 <= float(self.explore) <= 1:
            raise FedalignError(f"{self.label}.explore must be from 0 to 1, not {self.explore!r}")
        if self.senders not in ("all", "priority", "free"):
            raise FedalignError(f"{self.label}.senders must be all, priority or free, not {self.senders!r}")

    @property
    def needs_heldout(self) -> bool:
        """Whether held-out data is needed: it always weighs the candidates."""
        return True

    def personalise(self, start: Start) -> PersonalRun:
        """Exchange models with the other clients, from the served one on."""
        affinity: dict[int, float] = {}

        def one_pass(model: Model, number: int) -> Generator[PersonalRequest, Any, Model | None]:
            trained = yield Train(model, number, self.lr)
            if trained is None:
                return None
            others: Mapping[int, Model] = yield Exchange(trained, self.senders)
            asked = self._chosen(sorted(others), affinity, start, number)
            models = [trained, *(others[n] for n in asked)]
            before, *measures = yield Measured((model, *models))
            shares = weights(before.loss, [one.loss for one in measures], distances(models, model))
            for n, share in zip(asked, shares[1:], strict=True):
                affinity[n] = affinity.get(n, 0.0) + share
            return mixed(model, models, shares)

        return (yield from self.best_of(start.served, one_pass))

    def _chosen(self, others: Sequence[int], affinity: Mapping[int, float], start: Start, number: int) -> list[int]:
        """Choose whose models to measure; draws are hashes, so that a resumed run chooses alike."""
        if not self.candidates or len(others) <= self.candidates:
            return list(others)
        draws = {n: float(uniforms(start.seed, Purpose.CANDIDATES, number, start.client, n)) for n in others}
        ranked = sorted(others, key=lambda n: (-affinity.get(n, 0.0), draws[n]))
        by_chance = sorted(others, key=lambda n: draws[n])
        chosen: list[int] = []
        for place in range(self.candidates):
            explores = float(uniforms(start.seed, Purpose.CANDIDATES, number, start.client, -1 - place)) < self.explore
            chosen.append(next(n for n in (by_chance if explores else ranked) if n not in chosen))
        return sorted(chosen)


def weights(before: float, losses: Sequence[float], lengths: Sequence[float]) -> list[float]:
    """Return FedFomo's weights, which sum to 1; all are 0 where no candidate has a lower loss than before.

    >>> weights(1.0, [0.5, 0.8, 2.0], [1.0, 1.0, 1.0])
    [0.7142857142857143, 0.28571428571428564, 0.0]
    """
    raw = [
        (before - loss) / length if math.isfinite(loss) and loss < before and length > 0 else 0.0
        for loss, length in zip(losses, lengths, strict=True)
    ]
    total = math.fsum(raw)
    return [one / total for one in raw] if 0 < total < math.inf else [0.0] * len(raw)


def distances(models: Sequence[Model], origin: Model) -> list[float]:
    """Return how far models are from one of them, in double precision."""
    return [float((model - origin).double().norm()) for model in models]


def mixed(origin: Model, models: Sequence[Model], shares: Sequence[float]) -> Model:
    """Return ``origin + Σ share·(model − origin)``."""
    found = origin.clone()
    for model, share in zip(models, shares, strict=True):
        if share:
            found += share * (model - origin)
    return found
