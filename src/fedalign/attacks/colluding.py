"""Attacks by colluding clients, which shape what they send by the honest updates that they know."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedalign.aggregation.aggregator import Aggregator
from fedalign.attacks.attack import Attack, Scene, Updates, between, positive, whole
from fedalign.attacks.data import LabelFlip
from fedalign.attacks.line_search import strongest_factor
from fedalign.errors import FedalignError


@dataclass(frozen=True)
class _SameForAll(Attack, ABC):
    """An attack in which all hostile clients send one vector."""

    changes_updates: ClassVar[bool] = True

    def send(self, updates: Updates, scene: Scene) -> Mapping[int, torch.Tensor]:
        """Return the vector that :meth:`crafted` makes of the known updates, for every hostile client."""
        return dict.fromkeys(updates.own, self.crafted(updates.known))

    @abstractmethod
    def crafted(self, known: torch.Tensor) -> torch.Tensor:
        """Return the vector to send, given honest updates in rows."""


@dataclass(frozen=True)
class _WithFactor(Attack, ABC):
    """An attack in which all send one vector of a chosen strength. ``against`` is an aggregator, or its name."""

    changes_updates: ClassVar[bool] = True
    factor: float = 1.0
    against: Aggregator | str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        from fedalign.registry import AGGREGATORS

        if isinstance(self.factor, bool) or not isinstance(self.factor, int | float) or not math.isfinite(self.factor):
            raise FedalignError(f"factor must be a finite number, not {self.factor!r}")
        aggregator = AGGREGATORS.accept("against", self.against)
        if not isinstance(aggregator, Aggregator | None):
            raise FedalignError(f"against must be an aggregator or its name, not {self.against!r}")
        object.__setattr__(self, "against", aggregator)

    def send(self, updates: Updates, scene: Scene) -> Mapping[int, torch.Tensor]:
        """Return one vector for all; with ``against``, of the factor that harms that aggregator most."""
        factor = self.factor
        if isinstance(self.against, Aggregator):
            factor = strongest_factor(self.against, updates.known, len(updates.own), self.crafted)
        return dict.fromkeys(updates.own, self.crafted(updates.known, factor))

    @abstractmethod
    def crafted(self, known: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the vector of a factor, given honest updates in rows."""


@dataclass(frozen=True)
class LittleIsEnough(_WithFactor):
    """ALIE: the honest mean, moved by ``factor`` standard deviations in every coordinate.

    Baruch, Baruch and Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning" (2019,
    arXiv:1902.06156). With ``against``, an aggregator or its name, the factor is searched that moves that aggregate of
    honest and crafted updates farthest from the honest mean.

    >>> LittleIsEnough().crafted(torch.tensor([[0.0], [2.0]]), factor=1.0)
    tensor([2.4142])
    """

    factor: float = 1.5

    def crafted(self, known: torch.Tensor, factor: float) -> torch.Tensor:
        """Return ``mean + factor · std``."""
        return known.mean(0) + factor * _spread(known)


@dataclass(frozen=True)
class InnerProduct(_WithFactor):
    """IPM: the opposite of the honest mean, ``factor`` times as long.

    Xie, Koyejo and Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation" (2019,
    arXiv:1903.03936). ``against`` is as in :class:`LittleIsEnough`.

    >>> InnerProduct().crafted(torch.tensor([[1.0], [3.0]]), factor=2.0)
    tensor([-4.])
    """

    factor: float = 2.0

    def crafted(self, known: torch.Tensor, factor: float) -> torch.Tensor:
        """Return ``−factor · mean``."""
        return known.mean(0) * -factor


@dataclass(frozen=True)
class MinMax(_SameForAll):
    """Min-Max: as far from the honest mean as possible, yet no farther from any honest update than those are apart.

    Shejwalkar and Houmansadr, "Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses for
    Federated Learning" (NDSS 2021). The direction is the opposite of the standard deviation of every coordinate.
    """

    def crafted(self, known: torch.Tensor) -> torch.Tensor:
        """Return ``mean + γ·direction`` with the largest γ that keeps to the bound."""
        mean, direction = known.mean(0), -_spread(known)
        bound = float(torch.cdist(known.double(), known.double()).square().max())
        return mean + direction * self._reach(known, mean, direction, bound)

    @staticmethod
    def _reach(known: torch.Tensor, mean: torch.Tensor, direction: torch.Tensor, bound: float) -> float:
        a = float(direction.double().square().sum())
        if a == 0:
            return 0.0
        # |mean + γ·direction − x|² = aγ² + bγ + c ≤ bound, for every honest x
        apart = (mean - known).double()
        b = 2 * apart @ direction.double()
        c = apart.square().sum(1)
        roots = (-b + (b.square() - 4 * a * (c - bound)).clamp(min=0).sqrt()) / (2 * a)
        return max(0.0, float(roots.min()))


@dataclass(frozen=True)
class MinSum(_SameForAll):
    """Min-Sum: as Min-Max, with the sum of squared distances to the honest updates no larger than any honest one's."""

    def crafted(self, known: torch.Tensor) -> torch.Tensor:
        """Return ``mean + γ·direction`` with the largest γ that keeps to the bound."""
        mean, direction = known.mean(0), -_spread(known)
        bound = float(torch.cdist(known.double(), known.double()).square().sum(1).max())
        a = len(known) * float(direction.double().square().sum())
        if a == 0:
            return mean
        apart = (mean - known).double()
        b = 2 * float((apart @ direction.double()).sum())
        c = float(apart.square().sum())
        return mean + direction * max(0.0, (-b + math.sqrt(max(0.0, b * b - 4 * a * (c - bound)))) / (2 * a))


@dataclass(frozen=True)
class Mimic(_SameForAll):
    """Mimic: all send a copy of one honest client's update, which gives that client more weight.

    Karimireddy, He and Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing" (2022,
    arXiv:2006.09365). ``client`` counts among the updates that the attackers know.
    """

    free_rider: ClassVar[bool] = True
    client: int = 0

    def __post_init__(self) -> None:
        whole("client", self.client)

    def crafted(self, known: torch.Tensor) -> torch.Tensor:
        """Return the chosen client's update."""
        return known[self.client % len(known)]


@dataclass(frozen=True)
class AtCosine(Attack):
    """Bend the attackers' common update until it has a chosen ``cosine`` with the honest mean.

    It passes every test of direction below that cosine. ``length`` is a multiple of the honest updates' median length.
    After ``backdoor`` this crafts a backdoor; after ``label-flip`` it is ``harmful-direction``. Attackers that know
    their own updates alone have nothing to bend it against, and send their common update with that length.
    """

    changes_updates: ClassVar[bool] = True
    cosine: float = 0.3
    length: float = 1.0

    def __post_init__(self) -> None:
        between("cosine", self.cosine, -1, 1)
        positive("length", self.length)

    def send(self, updates: Updates, scene: Scene) -> Mapping[int, torch.Tensor]:
        """Return one vector for all, of the chosen cosine and length."""
        honest = updates.mean.double()
        along = honest / honest.norm().clamp(min=1e-30)
        harmful = torch.stack(list(updates.own.values())).mean(0).double()
        across = harmful - (harmful @ along) * along
        length = self.length * updates.known.double().norm(dim=1).median()
        if across.norm() > 1e-6 * harmful.norm():
            across = across / across.norm()
            crafted = length * (self.cosine * along + math.sqrt(1 - self.cosine**2) * across)
        else:
            crafted = length * along
        return dict.fromkeys(updates.own, crafted.to(updates.known.dtype))


@dataclass(frozen=True)
class HarmfulDirection(AtCosine):
    """Train on flipped labels, and bend the common update to a chosen ``cosine`` with the honest mean."""

    changes_data: ClassVar[bool] = True
    cosine: float = 0.01

    poison = LabelFlip.poison


@dataclass(frozen=True)
class Blend(Attack):
    """Mix the attackers' update with the honest mean, of which ``honest`` is the part: harm hidden in help."""

    changes_updates: ClassVar[bool] = True
    honest: float = 0.5

    def __post_init__(self) -> None:
        between("honest", self.honest, 0, 1)

    def send(self, updates: Updates, scene: Scene) -> Mapping[int, torch.Tensor]:
        """Return the mixed updates."""
        mean = updates.mean
        return {k: mean * self.honest + update * (1 - self.honest) for k, update in updates.own.items()}


def _spread(known: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of every coordinate; 0 where one update is known."""
    return known.std(0) if len(known) > 1 else torch.zeros_like(known[0])
