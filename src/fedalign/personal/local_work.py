"""The local work of a pass of a personal method, made from that of a run's rounds."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedalign.personal.method import Train
from fedalign.training.optimizer import LocalOptimizer

#: Passes count as rounds from here on, so that their batches are never those of a round.
FIRST_PASS = 1 << 40


class PersonalLocal:
    """Makes the local work of passes: one epoch with the run's optimiser, at a rate that does not change.

    A schedule that counts local steps gives clients with more samples a lower rate in the end, as in the run.

    >>> from fedalign import InverseTime, LocalSGD
    >>> decays = PersonalLocal(LocalSGD(lr=InverseTime(mu=1.0, gamma=1.0), steps=5), rounds=20)
    >>> [decays(Train(None, 0, first_rate=first), samples=60).lr for first in (True, False)]
    [2.0, 0.02]
    >>> work = PersonalLocal(LocalSGD(lr=0.1, epochs=5, mu=1.0), rounds=20)(Train(None, 0), samples=60)
    >>> work.lr, work.epochs, work.mu
    (0.1, 1, 0.0)
    """

    def __init__(self, local: LocalOptimizer, rounds: int) -> None:
        self._local, self._rounds = local, rounds
        self._made: dict[tuple[float, float], LocalOptimizer] = {}  # engines know local work by identity

    def __call__(self, request: Train, samples: int) -> LocalOptimizer:
        """Return the local work that a request asks for, of a client with so many training samples."""
        key = request.lr or self._rate(request.first_rate, samples), request.mu
        if key not in self._made:
            rate, _ = key
            changed: dict[str, Any] = {"lr": float(rate), "epochs": 1, "steps": None, "fresh": False, "mu": request.mu}
            if self._local.scaffold:
                changed["scaffold"] = False  # by itself a client has nothing to correct towards
            self._made[key] = dataclasses.replace(self._local, **changed)
        return self._made[key]

    def _rate(self, first: bool, samples: int) -> float:
        """Return the rate of the client's first local step in the run, or of its last one."""
        steps = self._local.steps_for(samples)
        round, step = (0, 0) if first else (self._rounds - 1, max(0, steps - 1))
        return self._local.rate(round, self._rounds, step, steps)
