"""What colluding attackers do to escape defences that look for updates which are alike. They come after an attack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedalign.attacks.attack import Attack, Scene, Updates, positive, whole
from fedalign.training.randomness import Purpose, generator


@dataclass(frozen=True)
class Disguise(Attack):
    """Add noise to the attackers' updates that hides what they have in common and cancels out in their sum.

    ``noise`` is its length, as a multiple of the attackers' median update; a smaller one hides less, and a larger one
    leaves less of an update that the server shortens. An attacker alone has nobody to hide from.

    >>> two = Updates({4: torch.ones(2), 5: torch.ones(2)}, torch.zeros(1, 2))
    >>> sent = Disguise().send(two, Scene(seed=0, round=3, rounds=10))
    >>> (sent[4] + sent[5]).round(decimals=4), round(float((sent[4] - 1).norm()), 4)
    (tensor([2., 2.]), 1.4142)
    """

    changes_updates: ClassVar[bool] = True
    noise: float = 1.0

    def __post_init__(self) -> None:
        positive("noise", self.noise)

    def send(self, updates: Updates, scene: Scene) -> Mapping[int, torch.Tensor]:
        """Return the updates with noise."""
        if len(updates.own) < 2:
            return updates.own
        rows = torch.stack(list(updates.own.values())).double()
        draws = [generator(scene.seed, Purpose.ADVERSARY, scene.round, k) for k in updates.own]
        noise = torch.stack([torch.from_numpy(draw.standard_normal(rows.shape[1])) for draw in draws]).to(rows)
        noise -= noise.mean(0)
        noise *= self.noise * rows.norm(dim=1).median() / noise.norm(dim=1).mean().clamp(min=1e-30)
        return dict(zip(updates.own, (rows + noise).to(updates.known.dtype), strict=True))


@dataclass(frozen=True)
class Decoys(Attack):
    """Let some attackers send what many honest updates have in common, so that being alike is nothing unusual.

    The first ``count`` attackers are given up: each sends the honest mean, moved in the direction of a part of the
    honest updates. The others send what they have.

    >>> updates = Updates({4: torch.zeros(1), 5: torch.ones(1)}, torch.tensor([[2.0], [4.0]]))
    >>> Decoys().send(updates, Scene(seed=0, round=3, rounds=10))
    {4: tensor([2.]), 5: tensor([1.])}
    """

    changes_updates: ClassVar[bool] = True
    count: int = 1

    def __post_init__(self) -> None:
        whole("count", self.count, least=1)

    def send(self, updates: Updates, scene: Scene) -> Mapping[int, torch.Tensor]:
        """Return the updates, with decoys in place of the first ones."""
        decoys, parts = sorted(updates.own)[: self.count], max(2, self.count)
        apart = updates.known.double() - updates.mean.double()
        lengths = apart.norm(dim=1)
        directions = apart / lengths[:, None].clamp(min=1e-30)
        sent = dict(updates.own)
        for i, k in enumerate(decoys):
            towards = directions[i::parts].sum(0)
            moved = towards / towards.norm().clamp(min=1e-30) * lengths.median()
            sent[k] = (updates.mean.double() + moved).to(updates.known.dtype)
        return sent
