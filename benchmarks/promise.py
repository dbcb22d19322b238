"""Checks the promise of docs/research/promise.md by simulation, and prints the tables of that page.

    python benchmarks/promise.py needed     # how many held-out samples a bound needs
    python benchmarks/promise.py bounds     # the bound beside others
    python benchmarks/promise.py reuse      # how often bounds fail if the same samples choose the models; about a minute
    python benchmarks/promise.py auto       # the same for AutoALIGN on Synth; about ten minutes

A bound fails in a run if it is below the true difference in any round. That may happen in 5 % of the runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import fedalign as fa
from fedalign.data.synth import Synth
from fedalign.protocol.messages import Outcomes
from fedalign.protocol.promise import chance_worse, promise, round_weight, samples_needed, upper_bound
from fedalign.protocol.records import Promise

ALPHA = 0.05
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Climb:
    """A made-up run that overfits its held-out samples.

    The own model is right with probability ``accuracy``. In each round every candidate replaces the served model's
    answers on a random part ``moved`` of all samples by answers that are right with probability ``accuracy − harm``.
    With ``reuse`` the candidate with the best held-out accuracy is served, else the first one.
    """

    samples: int = 200
    rounds: int = 40
    candidates: int = 8
    moved: float = 0.1
    harm: float = 0.05
    accuracy: float = 0.8
    reuse: bool = True

    def run(self, draw: np.random.Generator) -> Iterator[tuple[Outcomes, float]]:
        """Give each round's outcomes on the held-out samples, and the true difference."""
        own = draw.random(self.samples) < self.accuracy
        served, true = own, self.accuracy
        for _ in range(self.rounds):
            shape = (self.candidates, self.samples)
            new = draw.random(shape) < self.accuracy - self.harm
            options = np.where(draw.random(shape) < self.moved, new, served)
            served = options[int(options.sum(1).argmax()) if self.reuse else 0]
            true = (1 - self.moved) * true + self.moved * (self.accuracy - self.harm)
            yield compared(served, own), self.accuracy - true


def compared(served: Bools, own: Bools) -> Outcomes:
    return Outcomes(int((served & ~own).sum()), int((own & ~served).sum()), len(own))


@dataclass(frozen=True)
class Failures:
    """How often, in parts of all runs, a bound was below the truth in some round, and how often the alarm was wrong."""

    fresh: float
    strict: float
    bias: float  #: the last round's true difference less the one on held-out samples, mean
    alarm: float


def failures(setting: Climb, runs: int, seed: int = 0) -> Failures:
    """Count failures over ``runs`` runs. The alarm's hypothesis is that the harm of all rounds is at most the last's."""
    draw = np.random.default_rng(seed)
    failed = np.zeros((runs, 3), bool)
    bias = np.zeros(runs)
    worst = setting.harm  # never exceeded by the true difference
    for i in range(runs):
        before = Promise(alpha=ALPHA, delta=worst)
        for t, (outcomes, true) in enumerate(setting.run(draw)):
            nats = -math.log(round_weight(t, setting.rounds))
            choices = (t + 1) * math.log(setting.candidates)
            failed[i, 0] |= chance_worse(outcomes, true, nats) <= ALPHA
            failed[i, 1] |= chance_worse(outcomes, true, nats + choices) <= ALPHA
            before = promise(t, before, outcomes, choices, setting.rounds) if t == 0 else _evidence(t, before, outcomes)
            bias[i] = true - (outcomes.lost - outcomes.gained) / outcomes.samples
        failed[i, 2] = before.alarm
    fresh, strict, alarm = failed.mean(0)
    return Failures(float(fresh), float(strict), float(bias.mean()), float(alarm))


def _evidence(t: int, before: Promise, outcomes: Outcomes) -> Promise:
    return replace(before, evidence=promise(t, before, outcomes, 0.0).evidence)
