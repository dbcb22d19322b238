"""A model's random numbers in training: hashes of (seed, round, client, local step, which draw, position).

Dropout masks and other draws are then the same in both engines, on every device, for any chunk size and after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedalign.errors import FedalignError
from fedalign.simulation.engine.jobs import TrainJob
from fedalign.training.randomness import Purpose, hashed, hashed_positions

_BITS = 53
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def draw_keys(jobs: Sequence[TrainJob], device: torch.device) -> torch.Tensor:
    """Give a key for every job and local step (jobs × steps), from which all draws of that step are hashed."""
    who = np.array([(job.seed, job.round, job.client) for job in jobs], np.int64)
    steps = np.arange(max(job.steps for job in jobs))[None, :]
    keys = hashed(who[:, 0:1], Purpose.DROPOUT, who[:, 1:2], who[:, 2:3], steps)
    return torch.from_numpy(keys.view(np.int64)).to(device)


class Draws:
    """The draws of one forward pass, counted: the n-th draw of a step is the same however often the model is called.

    ``key`` is one number (under ``vmap``, one per client), or a vector with a key per client of a stack.

    >>> mask = Draws(torch.tensor(7)).kept(0.3, (10000,))
    >>> mask.dtype, round(mask.double().mean().item(), 1)
    (torch.bool, 0.7)
    """

    def __init__(self, key: torch.Tensor) -> None:
        self._key = key
        self.count = 0

    def bits(self, shape: Sequence[int]) -> torch.Tensor:
        """Draw whole numbers below 2⁵³."""
        words = hashed_positions(self._key, self.count, shape)
        self.count += 1
        return (words >> (64 - _BITS)).bitwise_and_((1 << _BITS) - 1)

    def kept(self, p: float, shape: Sequence[int]) -> torch.Tensor:
        """Draw a mask that is False with probability ``p``. It compares integers, so every device draws the same."""
        return self.bits(shape) >= round(p * (1 << _BITS))

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Draw numbers from [0, 1), with as many digits as the type holds exactly."""
        digits = _DIGITS[dtype]
        return (self.bits(shape) >> (_BITS - digits)).to(dtype).mul_(2.0**-digits)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Draw from the standard normal distribution (Box and Muller, 1958)."""
        first = (self.bits(shape).to(torch.float64) + 0.5) * 2.0**-_BITS
        second = self.bits(shape).to(torch.float64) * 2.0**-_BITS
        return ((-2 * first.log()).sqrt() * (2 * torch.pi * second).cos()).to(dtype)

    def scaled_mask(self, p: float, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Draw dropout's factors: 0 with probability ``p``, else ``1/(1 − p)``."""
        return self.kept(p, shape).to(dtype).div_(1 - p)


class NoDraws(Draws):
    """The draws of an evaluation: there are none."""

    def __init__(self) -> None:
        super().__init__(torch.zeros((), dtype=torch.int64))

    def bits(self, shape: Sequence[int]) -> torch.Tensor:
        """Raise, because an evaluation must not depend on random numbers."""
        raise FedalignError(
            "the model draws random numbers in evaluation too, so its losses could not be repeated; draw them in "
            "training alone (F.dropout needs training=self.training)"
        )
