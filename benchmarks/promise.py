"""Checks the promise of docs/research/promise.md by simulation, and prints the tables of that page.

    python benchmarks/promise.py needed     # how many held-out samples a bound needs
    python benchmarks/promise.py bounds     # the bound beside others
    python benchmarks/promise.py reuse      # how often bounds fail if the same samples choose the models
    python benchmarks/promise.py auto       # the same for AutoALIGN on Synth
    python benchmarks/promise.py verified   # the same for what verified rounds record, with and without an attack

A bound fails in a run if it is below the true difference in any round. That may happen in 5 % of the runs.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import fedalign as fa
from fedalign.data.synth import Synth
from fedalign.protocol.messages import Outcomes
from fedalign.protocol.promise import chance_worse, log_evidence, round_weight, samples_needed, upper_bound
from fedalign.protocol.records import Promise

ALPHA = 0.05
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Climb:
    """A made-up run that overfits its held-out samples.

    The own model is right with probability ``accuracy``. In each round every candidate replaces the served model's
    answers on a random part ``moved`` of all samples by answers that are right with probability ``accuracy − harm``.
    With ``reuse`` the candidate with the best held-out accuracy is served, else the first one. The next round starts
    from the served model if choices are ``lasting``, else from the first candidate.
    """

    samples: int = 200
    rounds: int = 40
    candidates: int = 8
    moved: float = 0.1
    harm: float = 0.05
    accuracy: float = 0.8
    reuse: bool = True
    lasting: bool = True

    def run(self, draw: np.random.Generator) -> Iterator[tuple[Outcomes, float]]:
        """Give each round's outcomes on the held-out samples, and the true difference."""
        own = draw.random(self.samples) < self.accuracy
        start, true = own, self.accuracy
        for _ in range(self.rounds):
            shape = (self.candidates, self.samples)
            new = draw.random(shape) < self.accuracy - self.harm
            options = np.where(draw.random(shape) < self.moved, new, start)
            served = options[int(options.sum(1).argmax()) if self.reuse else 0]
            start = served if self.lasting else options[0]
            true = (1 - self.moved) * true + self.moved * (self.accuracy - self.harm)
            yield compared(served, own), self.accuracy - true


def compared(served: Bools, own: Bools) -> Outcomes:
    return Outcomes(int((served & ~own).sum()), int((own & ~served).sum()), len(own))


@dataclass(frozen=True)
class Failures:
    """How often, in parts of all runs, a bound was below the truth in some round, and how often the alarm was wrong."""

    fresh: float
    strict: float
    alarm: float
    bias: float  #: the last round's true difference less the one on held-out samples, mean
    error: float  #: standard error of that mean
    bounds: tuple[float, float]  #: the last round's bounds, mean


def failures(setting: Climb, runs: int, seed: int = 0) -> Failures:
    """Count failures over runs. An alarm is always false here: no difference ever exceeds ``setting.harm``."""
    draw = np.random.default_rng(seed)
    nats = [(t + 1 if setting.lasting else 1) * math.log(setting.candidates) for t in range(setting.rounds)]
    return summary([list(setting.run(draw)) for _ in range(runs)], nats, setting.harm)


def summary(runs: Sequence[Sequence[tuple[Outcomes, float]]], log_choices: Sequence[float], delta: float) -> Failures:
    """Summarise runs, each a list of outcomes and true differences; ``log_choices`` has an entry for each round."""
    failed = np.zeros((len(runs), 3), bool)
    last = np.zeros((len(runs), 3))
    for i, run in enumerate(runs):
        evidence = 0.0
        for t, (o, true) in enumerate(run):
            weight = round_weight(t, len(run))
            nats = -math.log(weight)
            failed[i, 0] |= chance_worse(o, true, nats) <= ALPHA
            failed[i, 1] |= chance_worse(o, true, nats + log_choices[t]) <= ALPHA
            evidence += weight * math.exp(log_evidence(o.lost, o.gained, o.samples, delta))
        failed[i, 2] = evidence >= 1 / ALPHA and max(true for _, true in run) <= delta
        o, true = run[-1]
        needed = math.log(len(run) / ALPHA)
        last[i] = (
            true - (o.lost - o.gained) / o.samples,
            upper_bound(o.gained, o.lost, o.samples, needed),
            upper_bound(o.gained, o.lost, o.samples, needed + log_choices[-1]),
        )
    fresh, strict, alarm = failed.mean(0).tolist()
    bias, bound, strict_bound = last.mean(0).tolist()
    error = float(last[:, 0].std(ddof=1)) / math.sqrt(len(runs))
    return Failures(fresh, strict, alarm, bias, error, (bound, strict_bound))


class Models(fa.Callback):
    """Keeps the served model and the number of candidates of every round."""

    needs_model = True

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.candidates: list[int] = []

    def on_round(self, record: fa.RoundRecord, model: nn.Module | None) -> None:
        assert model is not None
        self.models.append(model)
        self.candidates.append(max(1, len(record.tried)))


def auto_run(seed: int, samples: int, rounds: int, fallback: bool = True) -> tuple[list[tuple[Outcomes, float]], int]:
    """Run AutoALIGN and FedAvg on the priority clients; compare both in every round, on held-out and on test data."""
    fed = Synth(alpha=0.5, beta=0.5, priority=4, free=8, samples=samples, test_samples=5000).federation(seed)
    local = fa.LocalSGD(lr=0.05, epochs=2, batch_size=20)
    kept = [Models(), Models()]
    specs = [
        fa.RunSpec(fed, rule, rounds, 0.0, local, seed=seed, callbacks=[keep])
        for rule, keep in zip((fa.AutoAlign(fallback=fallback, credit=True), fa.PriorityOnly()), kept, strict=True)
    ]
    fa.simulate_many(specs, lambda: nn.Linear(60, 10), device="cpu")
    rows = [np.concatenate([c.rows(split) for c in fed.clients if c.priority]) for split in ("heldout", "test")]
    found = []
    for served, own in zip(kept[0].models, kept[1].models, strict=True):
        held, test = (compared(*(_right(model, fed, at) for model in (served, own))) for at in rows)
        found.append((held, (test.lost - test.gained) / test.samples))
    return found, max(kept[0].candidates)


def verified_run(seed: int, samples: int, rounds: int, attack: str | None) -> list[tuple[Promise, float, float]]:
    """Run verified rounds and FedAvg on the priority clients.

    Gives each round's promise, and how much worse the served model is on test data and on held-out data.
    """
    fed = Synth(
        alpha=0.5,
        beta=0.5,
        priority=4,
        free=8,
        samples=samples,
        test_samples=5000,
        label_noise=0.0,
        random_fraction=0.0,
    ).federation(seed)
    local = fa.LocalSGD(lr=0.05, epochs=2, batch_size=20)
    kept = [Models(), Models()]
    hostile = None if attack is None else fa.Adversary(attack, fraction=0.5)
    specs = [
        fa.RunSpec(fed, rule, rounds, 0.0, local, seed=seed, callbacks=[keep], adversary=hostile)
        for rule, keep in zip((fa.Verified(), fa.PriorityOnly()), kept, strict=True)
    ]
    verified, _ = fa.simulate_many(specs, lambda: nn.Linear(60, 10), device="cpu")
    rows = [np.concatenate([c.rows(split) for c in fed.clients if c.priority]) for split in ("test", "heldout")]
    found = []
    for record, served, own in zip(verified.history.rounds, kept[0].models, kept[1].models, strict=True):
        true, held = (
            (outcomes.lost - outcomes.gained) / outcomes.samples
            for outcomes in (compared(_right(served, fed, at), _right(own, fed, at)) for at in rows)
        )
        found.append((record.promise, true, held))
    return found


def summary_of_records(runs: Sequence[Sequence[tuple[Promise, float, float]]]) -> Failures:
    """Summarise the promises that runs recorded; a round without a promise promises nothing."""
    failed, last = np.zeros((len(runs), 3), bool), np.zeros((len(runs), 3))
    for i, run in enumerate(runs):
        made = [(p, true, held) for p, true, held in run if p is not None and p.worse_by is not None]
        failed[i, 0] = any(true > p.worse_by for p, true, _ in made)
        failed[i, 1] = any(true > p.strict for p, true, _ in made)
        failed[i, 2] = any(p.alarm for p, _, _ in made) and max(true for _, true, _ in run) <= made[-1][0].delta
        p, true, held = made[-1]
        last[i] = true - held, p.worse_by, p.strict
    fresh, strict, alarm = failed.mean(0).tolist()
    bias, bound, strict_bound = last.mean(0).tolist()
    error = float(last[:, 0].std(ddof=1)) / math.sqrt(len(runs))
    return Failures(fresh, strict, alarm, bias, error, (bound, strict_bound))


def _right(model: nn.Module, fed: fa.Federation, rows: npt.NDArray[np.int64]) -> Bools:
    with torch.no_grad():
        return np.asarray((model(fed.pool.x[rows]).argmax(1) == fed.pool.y[rows]).numpy())


def needed(_: argparse.Namespace) -> None:
    print(
        "| δ, points | disagreement | one round | 40 rounds | strict, 8 models a round "
        "| strict, 8 lasting choices a round |\n|---|---|---|---|---|---|"
    )
    for delta in (0.05, 0.02, 0.01, 0.005):
        for disagreement in (0.02, 0.05, 0.1):
            costs = [(1, 0.0), (40, 0.0), (40, math.log(8)), (40, 40 * math.log(8))]
            counts = [samples_needed(delta, ALPHA, disagreement, rounds, choices) for rounds, choices in costs]
            print(f"| {100 * delta:g} | {100 * disagreement:g} % | {' | '.join(f'{n:,}' for n in counts)} |")


def bounds(_: argparse.Namespace) -> None:
    from scipy.stats import beta

    print("| samples | disagreement | chance | this bound | two Clopper-Pearson | empirical Bernstein | Hoeffding |")
    print("|---|---|---|---|---|---|---|")
    for n in (200, 1000, 10_000):
        for disagreement in (0.02, 0.1):
            for alpha in (ALPHA, ALPHA / 40, ALPHA / 40 / 8.0**40):
                each, nats = round(n * disagreement / 2), -math.log(alpha)
                exact = float(beta.isf(alpha / 2, each + 1, n - each) - beta.ppf(alpha / 2, each, n - each + 1))
                variance = 2 * each / (n - 1)
                bernstein = math.sqrt(2 * variance * (nats + math.log(2)) / n) + 14 * (nats + math.log(2)) / 3 / (n - 1)
                others = (upper_bound(each, each, n, nats), exact, bernstein, math.sqrt(2 * nats / n))
                shown = " | ".join(f"{100 * min(1, one):.2f}" for one in others)
                print(f"| {n:,} | {100 * disagreement:g} % | {alpha:.0e} | {shown} |")


def reuse(given: argparse.Namespace) -> None:
    settings = {
        "served without a look at the samples": Climb(reuse=False),
        "best of 8 a round, not lasting": Climb(lasting=False),
        "best of 64 a round, not lasting, larger changes": Climb(candidates=64, moved=0.3, lasting=False),
        "best of 8 a round": Climb(),
        "best of 8, 2,000 samples": Climb(samples=2000),
        "best of 8, 200 rounds": Climb(rounds=200),
        "best of 64 a round": Climb(candidates=64),
        "best of 64, larger changes": Climb(candidates=64, moved=0.3),
    }
    _head()
    for name, setting in settings.items():
        _row(name, failures(setting, given.runs))


def auto(given: argparse.Namespace) -> None:
    _head()
    for fallback, samples in itertools.product((True, False), (50, 200, 1000)):
        found = [auto_run(seed, samples, 30, fallback) for seed in range(given.runs)]
        runs, most = [run for run, _ in found], max(candidates for _, candidates in found)
        for name, lasting in (("counted once", False), ("lasting", True)):
            nats = [(t + 1 if lasting else 1) * math.log(most) for t in range(30)]
            kind = "" if fallback else ", no fallback"
            _row(f"{4 * samples // 5} samples{kind}; {most} candidates, {name}", summary(runs, nats, 0.02))


def verified(given: argparse.Namespace) -> None:
    _head()
    for attack, samples in itertools.product((None, "sign-flip", "label-flip"), (50, 200)):
        runs = [verified_run(seed, samples, 30, attack) for seed in range(given.runs)]
        _row(f"{4 * samples // 5} samples, {attack or 'no attack'}", summary_of_records(runs))


def _head() -> None:
    print(
        "| models | bound fails | strict bound fails | false alarms | bias | bound | strict bound |\n"
        "|---|---|---|---|---|---|---|"
    )


def _row(name: str, found: Failures) -> None:
    parts = " | ".join(f"{100 * part:.1f} %" for part in (found.fresh, found.strict, found.alarm))
    bias = f"{100 * found.bias:.1f} ± {100 * found.error:.1f}"
    print(f"| {name} | {parts} | {bias} | {' | '.join(f'{100 * one:.1f}' for one in found.bounds)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["needed", "bounds", "reuse", "auto", "verified"])
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    {"needed": needed, "bounds": bounds, "reuse": reuse, "auto": auto, "verified": verified}[options.what](options)
