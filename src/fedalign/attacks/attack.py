"""What an attack is: the class to subclass, and what colluding attackers know in a round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedalign.errors import FedalignError

Samples = tuple[torch.Tensor, torch.Tensor]  # features and labels


@dataclass(frozen=True)
class Scene:
    """Where an attack happens. Random attacks hash the seed, the round and a client's number; they have no state."""

    seed: int
    round: int
    rounds: int


@dataclass(frozen=True)
class Updates:
    """The updates of a round, as far as the attackers know them: the trainable part of ``w_k − w``.

    ``own`` holds the hostile clients' updates by client, as local training on their data gave them. ``known`` holds the
    updates that the attackers have seen, one in a row: with ``knows="all"`` those of all honest clients that take part,
    with ``knows="own"`` the attackers' own.
    """

    own: Mapping[int, torch.Tensor]
    known: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """The mean of the known updates."""
        return self.known.mean(0)


class Attack:
    """Something that hostile clients do. Override one or more of the methods; each default is honest.

    Attacks are combined in order: one may poison the data, the next one change the update.

    >>> class Half(Attack):
    ...     changes_updates = True
    ...     def send(self, updates, scene):
    ...         return {k: update / 2 for k, update in updates.own.items()}
    >>> updates = Updates({4: torch.tensor([2.0, 4.0])}, torch.zeros(1, 2))
    >>> Half().send(updates, Scene(seed=0, round=3, rounds=10))
    {4: tensor([1., 2.])}
    """

    changes_data: ClassVar[bool] = False  #: True: :meth:`poison` changes samples
    changes_updates: ClassVar[bool] = False  #: True: :meth:`send` changes updates, which a simulation then holds
    has_trigger: ClassVar[bool] = False  #: True: :meth:`stamp` adds a trigger, and its success is measured
    free_rider: ClassVar[bool] = False  #: True: the attack takes without giving; it does not harm the model

    def poison(self, samples: Samples, classes: int, seed: int) -> Samples:
        """Return the samples that a hostile client uses in place of its own, as many and of the same shape and type.

        ``classes`` is the number of classes, 0 for a task without; ``seed`` differs from client to client.
        """
        return samples

    def stamp(self, samples: Samples) -> Samples:
        """Return the samples with the trigger and the attackers' label, without those that have that label anyway."""
        raise FedalignError(f"{type(self).__name__} has no trigger")

    def send(self, updates: Updates, scene: Scene) -> Mapping[int, torch.Tensor]:
        """Return the update that each hostile client sends."""
        return updates.own

    def spoil(self, buffers: torch.Tensor) -> torch.Tensor:
        """Return what a hostile client sends for the numbers that are not trained, such as BatchNorm's statistics."""
        return buffers


def positive(name: str, value: float, least: float = 0.0) -> None:
    """Refuse an option of an attack that is not a number above ``least``."""
    if not _is_number(value) or not least < value < math.inf:
        raise FedalignError(f"{name} must be a number above {least:g}, not {value!r}")


def finite(name: str, value: float) -> None:
    """Refuse an option of an attack that is not a finite number."""
    if not _is_number(value) or not math.isfinite(value):
        raise FedalignError(f"{name} must be a finite number, not {value!r}")


def between(name: str, value: float, low: float, high: float) -> None:
    """Refuse an option of an attack that is not a number from ``low`` to ``high``."""
    if not _is_number(value) or not low <= value <= high:
        raise FedalignError(f"{name} must be from {low:g} to {high:g}, not {value!r}")


def whole(name: str, value: int, least: int = 0) -> None:
    """Refuse an option of an attack that is not a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise FedalignError(f"{name} must be a whole number of at least {least}, not {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
