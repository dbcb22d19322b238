"""The promise by simulation: it holds with fresh samples, reuse breaks it, and the strict bound holds nevertheless.

Longer runs of the same: benchmarks/promise.py, with results in docs/research/promise.md.
"""

import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from fedalign.protocol.promise import promise
from fedalign.protocol.records import Promise

pytestmark = pytest.mark.slow

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
check = importlib.import_module("promise")
sys.path.pop(0)


@pytest.mark.parametrize("samples", [40, 400])
@pytest.mark.parametrize("harm", [0.0, 0.2])
def test_it_holds_for_models_that_do_not_depend_on_the_samples(samples, harm):
    found = check.failures(check.Climb(samples=samples, rounds=20, harm=harm, candidates=2, reuse=False), 150)
    assert found.fresh <= 0.05
    assert found.alarm <= 0.05
    assert abs(found.bias) < 0.02


@pytest.mark.parametrize("setting", [check.Climb(samples=100), check.Climb(candidates=32, moved=0.3)])
def test_reuse_breaks_it_and_the_strict_bound_holds(setting):
    found = check.failures(setting, 60)
    assert found.fresh > 0.5
    assert found.strict == 0


def test_choices_that_do_not_last_cost_little():
    found = check.failures(check.Climb(candidates=64, moved=0.3, rounds=20, lasting=False), 100)
    assert found.bias > 0.03, "the choice favours models that look better than they are"
    assert found.strict <= 0.05
    assert found.bounds[1] - found.bounds[0] < 0.06


def test_the_alarm_sounds():
    run = list(check.Climb(samples=1000, harm=0.3, moved=0.3, reuse=False).run(np.random.default_rng(0)))
    before = Promise(delta=0.05)
    for t, (outcomes, _) in enumerate(run):
        before = promise(t, before, outcomes, rounds=len(run))
    assert before.alarm


def test_it_holds_for_autoalign():
    runs = [check.auto_run(seed, 50, 8) for seed in range(3)]
    most = max(candidates for _, candidates in runs)
    assert most > 2
    nats = [math.log(most) * (t + 1) for t in range(8)]
    assert check.summary([run for run, _ in runs], nats, 0.02).strict == 0
