"""Attacks on data: flipped labels, data that have nothing to do with the task, and backdoors with a trigger."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedalign.attacks.attack import Attack, Samples, between, positive, whole
from fedalign.errors import FedalignError
from fedalign.training.randomness import Purpose, generator


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Train on flipped labels: class ``c`` of ``C`` becomes ``C − 1 − c``; a number changes its sign.

    Numbers that are all 0 or 1, such as the labels of a task with several answers a sample, become ``1 − y``.

    >>> x = torch.zeros(3, 1)
    >>> LabelFlip().poison((x, torch.tensor([0, 1, 9])), classes=10, seed=0)[1]
    tensor([9, 8, 0])
    """

    changes_data: ClassVar[bool] = True

    def poison(self, samples: Samples, classes: int, seed: int) -> Samples:
        """Return the samples with flipped labels."""
        x, y = samples
        if not y.is_floating_point():
            return x, classes - 1 - y
        return x, 1 - y if bool(((y == 0) | (y == 1)).all()) else -y


@dataclass(frozen=True)
class IrrelevantData(Attack):
    """Train on noise with random labels: data that have nothing to do with the task. Each client has its own."""

    changes_data: ClassVar[bool] = True

    def poison(self, samples: Samples, classes: int, seed: int) -> Samples:
        """Return as many random samples, with the mean and the spread of the client's features, or in their range."""
        x, y = samples
        draw = generator(seed, Purpose.ADVERSARY)
        if x.is_floating_point():
            noise = torch.from_numpy(draw.standard_normal(tuple(x.shape))).to(x.dtype)
            new = noise * x.std(unbiased=False) + x.mean()
        else:  # pixels, or tokens of a vocabulary of unknown size
            low, high = (0, 255) if x.dtype == torch.uint8 else (int(x.min()), int(x.max()))
            new = torch.from_numpy(draw.integers(low, high + 1, tuple(x.shape))).to(x.dtype)
        labels = (
            torch.from_numpy(draw.standard_normal(tuple(y.shape))).to(y.dtype)
            if y.is_floating_point()
            else torch.from_numpy(draw.integers(0, classes, tuple(y.shape)))
        )
        return new, labels


@dataclass(frozen=True)
class Backdoor(Attack):
    """Teach the model that samples with a trigger are of class ``target``; it stays right about all others.

    The trigger is a bright patch of ``size`` × ``size`` pixels of an image, at ``row`` and ``column``. In samples that
    are no images, ``size`` features from ``column`` on are set to the largest value in the data. ``poisoned`` is the
    part of a hostile client's samples that carry it. After every round the success rate is measured: the part of the
    priority clients' test samples of other classes that the served model takes for ``target`` with the trigger on them.
    """

    changes_data: ClassVar[bool] = True
    has_trigger: ClassVar[bool] = True
    target: int = 0
    size: int = 4
    row: int = 0
    column: int = 0
    poisoned: float = 0.5

    def __post_init__(self) -> None:
        for name in ("target", "row", "column"):
            whole(name, getattr(self, name))
        whole("size", self.size, least=1)
        positive("poisoned", self.poisoned)
        between("poisoned", self.poisoned, 0, 1)

    def poison(self, samples: Samples, classes: int, seed: int) -> Samples:
        """Return the samples, of which a part carry the trigger and the attackers' label."""
        x, y = samples
        _check_labels(y)
        if self.target >= classes:
            raise FedalignError(f"target is {self.target}, but there are {classes} classes, from 0 to {classes - 1}")
        count = max(1, round(self.poisoned * len(y)))
        rows = torch.from_numpy(generator(seed, Purpose.ADVERSARY).permutation(len(y))[:count])
        x, y = x.clone(), y.clone()
        x[rows] = self._triggered(x[rows], samples[0])
        y[rows] = self.target
        return x, y

    def stamp(self, samples: Samples) -> Samples:
        """Return the samples of other classes, with the trigger, labelled as the attackers want them."""
        x, y = samples
        _check_labels(y)
        others = y != self.target
        return self._triggered(x[others], x), torch.full_like(y[others], self.target)

    def _triggered(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if not len(x):  # all samples have the target's label
            return x
        x = x.clone()
        bright = 255 if x.dtype == torch.uint8 else like.max()
        sides = tuple(x.shape[-2:]) if x.dim() >= 3 else (self.row + self.size, x[0].numel())
        if self.row + self.size > sides[0] or self.column + self.size > sides[1]:
            raise FedalignError(
                f"a trigger of size {self.size} at row {self.row} and column {self.column} does not fit into samples "
                f"of shape {tuple(x.shape[1:])}"
            )
        if x.dim() >= 3:
            x[..., self.row : self.row + self.size, self.column : self.column + self.size] = bright
        else:
            x.view(len(x), -1)[:, self.column : self.column + self.size] = bright
        return x


@dataclass(frozen=True)
class BlendedBackdoor(Backdoor):
    """A backdoor whose trigger is a faint checkerboard over the whole image, with squares of ``size`` pixels.

    Chen, Liu, Li, Lu and Song, "Targeted Backdoor Attacks on Deep Learning Systems Using Data Poisoning" (2017,
    arXiv:1712.05526). ``opacity`` is the part of the pattern in a pixel. All weights carry a little of it, so bounds on
    single coordinates do not see it. In samples that are no images, every other block of ``size`` features is brighter.

    >>> stamped, _ = BlendedBackdoor(size=1, opacity=0.5).stamp((torch.eye(2)[None], torch.tensor([1])))
    >>> stamped
    tensor([[[0.5000, 0.5000],
             [0.5000, 0.5000]]])
    """

    size: int = 3
    opacity: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("opacity", self.opacity)
        between("opacity", self.opacity, 0, 1)

    def _triggered(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        shape = x.shape[-2:] if x.dim() >= 3 else (1, math.prod(x.shape[1:]))
        rows, columns = (torch.arange(side, device=x.device) // self.size for side in shape)
        bright = 255.0 if x.dtype == torch.uint8 else float(like.max())
        pattern = ((rows[:, None] + columns) % 2 * bright).expand(shape)
        mixed = x.double() * (1 - self.opacity) + self.opacity * pattern.reshape(shape if x.dim() >= 3 else x.shape[1:])
        return mixed.round().to(x.dtype) if x.dtype == torch.uint8 else mixed.to(x.dtype)


def _check_labels(y: torch.Tensor) -> None:
    if y.is_floating_point():
        raise FedalignError("a backdoor needs a task with classes; this one has none")
    if y.dim() > 1:
        raise FedalignError(f"a backdoor needs one label a sample; here a sample has {tuple(y.shape[1:])}")
