"""Attacks on updates that need no knowledge of others: sign flips, scaling, noise, free riders, broken numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedalign.attacks.attack import Attack, Scene, Updates, positive
from fedalign.errors import FedalignError
from fedalign.training.randomness import Purpose, generator


@dataclass(frozen=True)
class SignFlip(Attack):
    """Send the opposite of the honest update, ``scale`` times as long.

    >>> updates = Updates({4: torch.tensor([1.0, -2.0])}, torch.zeros(1, 2))
    >>> SignFlip(scale=2.0).send(updates, Scene(0, 0, 1))
    {4: tensor([-2.,  4.])}
    """

    changes_updates: ClassVar[bool] = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        positive("scale", self.scale)

    def send(self, updates: Updates, scene: Scene) -> Mapping[int, torch.Tensor]:
        """Return the negated updates."""
        return {k: update * -self.scale for k, update in updates.own.items()}


@dataclass(frozen=True)
class Scaling(Attack):
    """Send the update ``factor`` times as long: alone, an honest direction; after a data attack, a boosted one."""

    changes_updates: ClassVar[bool] = True
    factor: float = 9.9

    def __post_init__(self) -> None:
        positive("factor", self.factor)

    def send(self, updates: Updates, scene: Scene) -> Mapping[int, torch.Tensor]:
        """Return the scaled updates."""
        return {k: update * self.factor for k, update in updates.own.items()}


@dataclass(frozen=True)
class Gaussian(Attack):
    """Send noise, ``scale`` times as long as the honest update."""

    changes_updates: ClassVar[bool] = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        positive("scale", self.scale)

    def send(self, updates: Updates, scene: Scene) -> Mapping[int, torch.Tensor]:
        """Return one random direction for each client."""
        return {k: self._noise(update, scene, k) for k, update in updates.own.items()}

    def _noise(self, update: torch.Tensor, scene: Scene, client: int) -> torch.Tensor:
        draw = generator(scene.seed, Purpose.ADVERSARY, scene.round, client)
        noise = torch.from_numpy(draw.standard_normal(len(update))).to(update)
        length: torch.Tensor = self.scale * update.norm() / noise.norm()
        return noise * length


@dataclass(frozen=True)
class Zero(Attack):
    """Send the received model back: a free rider that trains nothing."""

    changes_updates: ClassVar[bool] = True
    free_rider: ClassVar[bool] = True

    def send(self, updates: Updates, scene: Scene) -> Mapping[int, torch.Tensor]:
        """Return updates of zero."""
        return {k: torch.zeros_like(update) for k, update in updates.own.items()}


@dataclass(frozen=True)
class Copied(Attack):
    """Send copies of honest updates, one client's each: a free rider that trains nothing."""

    changes_updates: ClassVar[bool] = True
    free_rider: ClassVar[bool] = True

    def send(self, updates: Updates, scene: Scene) -> Mapping[int, torch.Tensor]:
        """Return known updates in their order, again and again."""
        return {k: updates.known[i % len(updates.known)] for i, k in enumerate(updates.own)}


@dataclass(frozen=True)
class NotFinite(Attack):
    """Send one number that is not finite in an otherwise honest update."""

    changes_updates: ClassVar[bool] = True
    value: Literal["nan", "inf", "-inf"] = "nan"

    def __post_init__(self) -> None:
        if self.value not in ("nan", "inf", "-inf"):
            raise FedalignError(f"value must be 'nan', 'inf' or '-inf', not {self.value!r}")

    def send(self, updates: Updates, scene: Scene) -> Mapping[int, torch.Tensor]:
        """Return the updates with a broken first number."""
        sent = {k: update.clone() for k, update in updates.own.items()}
        for update in sent.values():
            update[0] = float(self.value)
        return sent


@dataclass(frozen=True)
class BadBuffers(Attack):
    """Send honest weights with impossible statistics, such as negative variances of BatchNorm."""

    changes_updates: ClassVar[bool] = True

    def spoil(self, buffers: torch.Tensor) -> torch.Tensor:
        """Return negative numbers in place of the statistics."""
        return -buffers.abs() - 1
