"""The work that every peer does, and how it is timed: FedAvg on 60 clients, 5 local epochs, batch 50, rate 0.05.

Imported by each peer's script in that peer's own virtual environment, so it needs NumPy alone.
"""

from __future__ import annotations

import itertools
import json
import sys
import time

import numpy as np

BORN = time.perf_counter()
EPOCHS, BATCH, RATE = 5, 50, 0.05
CASES = {  # sample shape, hidden widths (None: the paper's CNN), classes, clients, samples a client
    "logistic": ((784,), [], 10, 60, 1000),
    "network": ((784,), [200, 200], 47, 60, 600),
    "cnn": ((3, 32, 32), None, 10, 6, 200),
}


def arguments() -> tuple[str, int]:
    """Give the case and the number of rounds."""
    return sys.argv[1], int(sys.argv[2])


def clients(case: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Make a task that can be learnt: labels of a random linear model."""
    shape, _, classes, count, samples = CASES[case]
    draw = np.random.default_rng(0)
    W = draw.normal(size=(int(np.prod(shape)), classes)).astype(np.float32)
    made = []
    for _ in range(count):
        x = draw.normal(size=(samples, *shape)).astype(np.float32)
        made.append((x, (x.reshape(samples, -1) @ W).argmax(1)))
    return made


def initial(case: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draw the weights (inputs × outputs) and biases that every peer's fully connected layers start from."""
    shape, hidden, classes, _, _ = CASES[case]
    draw = np.random.default_rng(1)
    widths = [int(np.prod(shape)), *(hidden or []), classes]
    layers = []
    for before, after in itertools.pairwise(widths):
        bound = before**-0.5
        weights, bias = draw.uniform(-bound, bound, (before, after)), draw.uniform(-bound, bound, after)
        layers.append((weights.astype(np.float32), bias.astype(np.float32)))
    return layers


class Clock:
    """Notes the end of every round."""

    def __init__(self) -> None:
        self.ready = self.last = time.perf_counter()
        self.rounds: list[float] = []

    def tick(self) -> None:
        now = time.perf_counter()
        self.rounds.append(now - self.last)
        self.last = now

    def report(self, peer: str, version: str, accuracy: float) -> None:
        """Print one line of JSON: seconds to get ready, of the first round, of a later round (median), and more."""
        later = self.rounds[1:] or self.rounds
        found = {
            "peer": peer,
            "version": version,
            "start": self.ready - BORN,
            "first": self.rounds[0],
            "round": float(np.median(later)),
            "best": min(later),
            "accuracy": accuracy,
        }
        print("RESULT " + json.dumps(found), flush=True)
