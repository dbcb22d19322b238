"""Synth(α, β): the generator of FedProx (Li et al., 2020, arXiv:1812.06127), and FedALIGN's noisy free clients.

Priority client k draws ``u_k ~ N(0, α)``, ``W_k ~ N(u_k, 1)``, ``b_k ~ N(u_k, 1)``, ``B_k ~ N(0, β)``,
``v_k ~ N(B_k, 1)`` per dimension; its samples are ``x ~ N(v_k, Σ)`` with ``Σ_jj = j^-1.2`` and
``y = argmax(x W_k + b_k)``. α and β are standard deviations, as in that generator's code.

Free client j of M gets samples of the pooled priority data, made noisier with its level
``t_j = ((j + ½)/M)^(1/skew)``: labels move by a rounded uniform draw from ±label_noise·t_j (mod 10), and
random_fraction·t_j as many irrelevant points (normal x, uniform y) are added. The pool is what priority clients train
on: their held-out and test samples reach nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedalign.errors import FedalignError
from fedalign.federation import Federation
from fedalign.randomness import Purpose, generator

Samples = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
DIMENSIONS, CLASSES = 60, 10


@dataclass(frozen=True)
class Synth:
    """Settings of Synth(α, β); :meth:`federation` makes the data."""

    alpha: float = 1.0
    beta: float = 1.0
    priority: int = 10  #: how many priority clients
    free: int = 10  #: how many free clients
    samples: int = 250  #: a client's samples, held-out ones included; the smallest if sizes is "lognormal"
    sizes: str = "equal"  #: "equal", or FedProx's "lognormal": samples + int(lognormal(4, 2))
    test_samples: int = 250  #: a client's test samples
    label_noise: float = 2.5
    label_skew: float = 1.5
    random_fraction: float = 1.0
    random_skew: float = 1.5
    heldout_fraction: float = 0.2

    def __post_init__(self) -> None:
        for name in ("priority", "samples"):
            if getattr(self, name) < 1:
                raise FedalignError(f"data.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("alpha", "beta", "free", "test_samples", "label_noise", "random_fraction"):
            if not getattr(self, name) >= 0:
                raise FedalignError(f"data.{name} must be at least 0, not {getattr(self, name)}")
        for name in ("label_skew", "random_skew"):
            if not getattr(self, name) > 0:
                raise FedalignError(f"data.{name} must be positive, not {getattr(self, name)}")
        if self.sizes not in ("equal", "lognormal"):
            raise FedalignError(f"data.sizes must be 'equal' or 'lognormal', not {self.sizes!r}")
        if not 0 <= self.heldout_fraction < 1:
            raise FedalignError(f"heldout_fraction must be in [0, 1), not {self.heldout_fraction}")

    def federation(self, seed: int) -> Federation:
        """Make the federation of one seed.

        >>> Synth(priority=2, free=2, samples=50, random_fraction=0).federation(seed=0)
        Federation(4 clients, 2 priority, 160 training and 40 held-out samples)
        """
        priority = [self._priority_client(seed, k) for k in range(self.priority)]
        pool_x = np.concatenate([train[0] for train, _, _ in priority])
        pool_y = np.concatenate([train[1] for train, _, _ in priority])
        free = [self._free_client(seed, j, pool_x, pool_y, priority) for j in range(self.free)]
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
        return self.samples + int(generator(seed, Purpose.DATA, 1, client).lognormal(4, 2))

    def _priority_client(self, seed: int, k: int) -> tuple[Samples, Samples, Samples]:
        draw = generator(seed, Purpose.DATA, 2, k)
        u = draw.normal(0, self.alpha)
        W = draw.normal(u, 1, (DIMENSIONS, CLASSES))
        b = draw.normal(u, 1, CLASSES)
        v = draw.normal(draw.normal(0, self.beta), 1, DIMENSIONS)
        deviation = np.arange(1, DIMENSIONS + 1) ** -0.6
        size = self._size(seed, k)
        x = (v + deviation * draw.normal(size=(size + self.test_samples, DIMENSIONS))).astype(np.float32)
        y = (x @ W + b).argmax(1)
        return self._split((x[:size], y[:size]), (x[size:], y[size:]))

    def _free_client(
        self,
        seed: int,
        j: int,
        pool_x: npt.NDArray[np.float32],
        pool_y: npt.NDArray[np.int64],
        priority: list[tuple[Samples, Samples, Samples]],
    ) -> tuple[Samples, Samples, Samples]:
        draw = generator(seed, Purpose.DATA, 3, j)
        place = (j + 0.5) / self.free
        shift = self.label_noise * place ** (1 / self.label_skew)
        extra = self.random_fraction * place ** (1 / self.random_skew)

        def noisy(x: npt.NDArray[np.float32], y: npt.NDArray[np.int64]) -> Samples:
            y = (y + np.rint(draw.uniform(-shift, shift, len(y))).astype(np.int64)) % CLASSES
            added = round(extra * len(y))
            x = np.concatenate([x, draw.normal(size=(added, DIMENSIONS)).astype(np.float32)])
            y = np.concatenate([y, draw.integers(0, CLASSES, added)])
            order = draw.permutation(len(y))
            return x[order], y[order]

        size = self._size(seed, self.priority + j)
        taken = draw.choice(len(pool_y), size, replace=size > len(pool_y))
        tested = [test for _, _, test in priority]
        test_x, test_y = (np.concatenate(parts) for parts in zip(*tested, strict=True))
        tried = draw.choice(len(test_y), self.test_samples, replace=False) if len(test_y) else np.empty(0, np.int64)
        return self._split(noisy(pool_x[taken], pool_y[taken]), noisy(test_x[tried], test_y[tried]))

    def _split(self, own: Samples, test: Samples) -> tuple[Samples, Samples, Samples]:
        """Hold the last part out. Samples are independent draws, so their order carries nothing."""
        x, y = own
        held = min(max(1, round(self.heldout_fraction * len(y))), len(y) - 1) if self.heldout_fraction else 0
        kept = len(y) - held
        return (x[:kept], y[:kept]), (x[kept:], y[kept:]), test
