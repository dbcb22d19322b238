"""Synth(α, β): the generator of FedProx (Li et al., 2020, arXiv:1812.06127), and FedALIGN's noisy free clients.

Priority client k draws ``u_k ~ N(0, α)``, ``W_k ~ N(u_k, 1)``, ``b_k ~ N(u_k, 1)``, ``B_k ~ N(0, β)``,
``v_k ~ N(B_k, 1)`` per dimension; its samples are ``x ~ N(v_k, Σ)`` with ``Σ_jj = j^-1.2`` and
``y = argmax(x W_k + b_k)``. α and β are standard deviations, as in that generator's code.

Free client j of M gets samples of the pooled priority data, made noisier with its level
``t_j = ((j + ½)/M)^(1/skew)``: labels move by a rounded uniform draw from ±label_noise·t_j (mod 10), and
random_fraction·t_j as many irrelevant points (normal x, uniform y) are added. Each part is drawn from the same part of
the priority clients' data: training from training, held-out from held-out, test from test. So no held-out or test
sample is ever trained on, and F_k and F are both losses on unseen data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedalign.data.federation import Federation
from fedalign.errors import FedalignError
from fedalign.training.randomness import Purpose, generator

Samples = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
Parts = tuple[Samples, Samples, Samples]  # training, held-out, test
DIMENSIONS, CLASSES = 60, 10


@dataclass(frozen=True)
class Synth:
    """Settings of Synth(α, β); :meth:`federation` generates the data."""

    alpha: float = 1.0
    beta: float = 1.0
    priority: int = 10  #: number of priority clients
    free: int = 10  #: number of free clients
    samples: int = 250  #: samples of each client, including held-out ones, if sizes is "equal"
    sizes: str = "equal"  #: "equal", or FedProx's "lognormal": int(lognormal(4, 2)) + 50
    test_samples: int = 250  #: test samples of each client
    label_noise: float = 2.5
    label_skew: float = 1.5
    random_fraction: float = 1.0
    random_skew: float = 1.5
    heldout_fraction: float = 0.2

    def __post_init__(self) -> None:
        for name, least in (("priority", 1), ("samples", 2)):
            if getattr(self, name) < least:
                raise FedalignError(f"data.{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("alpha", "beta", "free", "test_samples", "label_noise", "random_fraction"):
            if not 0 <= getattr(self, name) < math.inf:
                raise FedalignError(f"data.{name} must be at least 0, not {getattr(self, name)}")
        for name in ("label_skew", "random_skew"):
            if not 0 < getattr(self, name) < math.inf:
                raise FedalignError(f"data.{name} must be positive, not {getattr(self, name)}")
        if self.sizes not in ("equal", "lognormal"):
            raise FedalignError(f"data.sizes must be 'equal' or 'lognormal', not {self.sizes!r}")
        if not 0 <= self.heldout_fraction < 1:
            raise FedalignError(f"heldout_fraction must be in [0, 1), not {self.heldout_fraction}")

    def federation(self, seed: int) -> Federation:
        """Generate the federation of one seed.

        >>> Synth(priority=2, free=2, samples=50, random_fraction=0).federation(seed=0)
        Federation(4 clients, 2 priority, 160 training and 40 held-out samples)
        """
        priority = [self._priority_client(seed, k) for k in range(self.priority)]
        pools = [
            (np.concatenate([c[s][0] for c in priority]), np.concatenate([c[s][1] for c in priority])) for s in range(3)
        ]
        free = [self._free_client(seed, j, pools) for j in range(self.free)]
        clients = priority + free
        return Federation.from_arrays(
            [train for train, _, _ in clients],
            heldout=[held for _, held, _ in clients] if self.heldout_fraction else None,
            test=[test for _, _, test in clients] if self.test_samples else None,
            priority=[True] * self.priority + [False] * self.free,
            heldout_fraction=0.0,
            seed=seed,
            names=[f"priority-{k}" for k in range(self.priority)] + [f"free-{j}" for j in range(self.free)],
        )

    def _size(self, seed: int, client: int) -> int:
        if self.sizes == "equal":
            return self.samples
        return int(generator(seed, Purpose.DATA, 1, client).lognormal(4, 2)) + 50

    def task(self, seed: int, k: int) -> tuple[npt.NDArray[np.float64], ...]:
        """Draw the labelling and the mean of priority client k: ``W_k``, ``b_k`` and ``v_k``."""
        draw = generator(seed, Purpose.DATA, 2, k)
        u = draw.normal(0, self.alpha)
        W = draw.normal(u, 1, (DIMENSIONS, CLASSES))
        b = draw.normal(u, 1, CLASSES)
        v = draw.normal(draw.normal(0, self.beta), 1, DIMENSIONS)
        return W, b, v

    def noise(self, j: int) -> tuple[float, float]:
        """Return the largest label shift of free client j, and its share of irrelevant points."""
        place = (j + 0.5) / self.free
        return self.label_noise * place ** (1 / self.label_skew), self.random_fraction * place ** (1 / self.random_skew)

    def _priority_client(self, seed: int, k: int) -> Parts:
        W, b, v = self.task(seed, k)
        deviation = np.arange(1, DIMENSIONS + 1) ** -0.6
        size = self._size(seed, k)
        normal = generator(seed, Purpose.DATA, 4, k).normal(size=(size + self.test_samples, DIMENSIONS))
        x = (v + deviation * normal).astype(np.float32)
        y = (x @ W + b).argmax(1)
        kept = size - self._held(size)
        # Samples are independent draws, so the first ones are as good as random ones.
        return (x[:kept], y[:kept]), (x[kept:size], y[kept:size]), (x[size:], y[size:])

    def _free_client(self, seed: int, j: int, pools: list[Samples]) -> Parts:
        draw = generator(seed, Purpose.DATA, 3, j)
        shift, extra = self.noise(j)

        def noisy(pool: Samples, count: int) -> Samples:
            taken = draw.choice(len(pool[1]), count, replace=count > len(pool[1])) if count else np.empty(0, np.int64)
            x, y = pool[0][taken], pool[1][taken]
            y = (y + np.rint(draw.uniform(-shift, shift, count)).astype(np.int64)) % CLASSES
            added = round(extra * count)
            x = np.concatenate([x, draw.normal(size=(added, DIMENSIONS)).astype(np.float32)])
            return x, np.concatenate([y, draw.integers(0, CLASSES, added)])

        size = self._size(seed, self.priority + j)
        held = self._held(size)
        return noisy(pools[0], size - held), noisy(pools[1], held), noisy(pools[2], self.test_samples)

    def _held(self, size: int) -> int:
        return min(max(1, round(self.heldout_fraction * size)), size - 1) if self.heldout_fraction else 0
