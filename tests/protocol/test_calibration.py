"""Losses at the best temperature: of engines, of clients together, and what they are for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedalign as fa
from fedalign.data.synth import Synth
from fedalign.protocol.calibration import TEMPERATURES, calibrated_mean, lowest
from fedalign.protocol.messages import Evaluate
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Measure
from fedalign.simulation.engine.batched import BatchedEngine
from fedalign.simulation.engine.jobs import Data, EvalJob
from fedalign.simulation.engine.reference import ReferenceEngine
from fedalign.training.losses import cross_entropy, hits, squared_error, tempered_losses

ROSTER = Roster(("a", "b"), (True, True), (30, 10))


def measure(outputs, targets):
    tempered = tempered_losses(cross_entropy, outputs, targets, TEMPERATURES).mean(0)
    loss, accuracy = cross_entropy(outputs, targets).mean().item(), hits(outputs, targets).mean().item()
    return Measure(loss, accuracy, len(targets), tuple(tempered.tolist()))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.5, 8.0))
def test_confidence_does_not_count(seed, factor):
    draw = torch.Generator().manual_seed(seed)
    outputs, targets = torch.randn(200, 5, generator=draw), torch.randint(0, 5, (200,), generator=draw)
    outputs[torch.arange(200), targets] += 1.5
    plain, louder = ({0: measure(outputs * scale, targets)} for scale in (1.0, factor))
    assert calibrated_mean(ROSTER, louder)[0] == pytest.approx(calibrated_mean(ROSTER, plain)[0], rel=1e-3)
    assert calibrated_mean(ROSTER, plain)[0] <= plain[0].loss + 1e-9


def test_a_worse_model_is_not_preferred_for_being_less_confident():
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 5, (400,), generator=draw)
    good, bad = (torch.randn(400, 5, generator=draw) for _ in range(2))
    good[torch.arange(400), targets] += 1.0
    bad[torch.arange(400), targets] += 0.5
    confident, timid = {0: measure(20 * good, targets)}, {0: measure(bad, targets)}
    assert confident[0].loss > 2 * timid[0].loss
    assert confident[0].accuracy > timid[0].accuracy + 0.05
    assert calibrated_mean(ROSTER, confident)[0] < calibrated_mean(ROSTER, timid)[0]


def test_all_clients_share_one_temperature():
    at = [(math.log2(t) - 1) ** 2 for t in TEMPERATURES], [(math.log2(t) - 3) ** 2 for t in TEMPERATURES]
    measures = {k: Measure(9.0, 0.5, 5, tuple(values)) for k, values in enumerate(at)}
    assert calibrated_mean(ROSTER, measures)[0] == pytest.approx(0.75 * 0.25 + 0.25 * 2.25)  # at 2^1.5


def test_plain_losses_where_there_are_no_others():
    some = {0: Measure(1.0, None, 5, (0.5,) * len(TEMPERATURES)), 1: Measure(3.0, None, 5)}
    assert calibrated_mean(ROSTER, some) == (1.5, None)
    broken = {0: Measure(math.inf, 0.1, 5, (0.5,) * len(TEMPERATURES))}
    assert calibrated_mean(ROSTER, broken)[0] == math.inf


@pytest.mark.parametrize("curve", [[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 2.0, math.inf], [1.0] * 5])
def test_the_lowest_point_at_an_edge(curve):
    assert lowest(curve) == 1.0


@pytest.fixture(scope="module")
def engines():
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 40, 6, generator=draw), torch.randint(0, 3, (4, 40), generator=draw)
    fed = fa.Federation.from_arrays(list(zip(x, y, strict=True)), priority=[True, True, False, False])
    module = torch.nn.Linear(6, 3)

    def made(kind, loss=cross_entropy):
        return kind(module, loss, Data([fed.pool], torch.device("cpu"), torch.float32))

    return fed, made


def jobs(fed, engine, tempered=True):
    draw = torch.Generator().manual_seed(2)
    models = [torch.randn(engine.layout.size, generator=draw) for _ in range(3)]
    return [EvalJob(m, fed.pool, c.rows("heldout"), tempered) for m in models for c in fed.clients]


def test_engines_agree(engines):
    fed, made = engines
    batched, reference = made(BatchedEngine), made(ReferenceEngine)
    pairs = zip(*(engine.evaluate(jobs(fed, engine)) for engine in (batched, reference)), strict=True)
    for one, other in pairs:
        assert one.tempered == pytest.approx(other.tempered, rel=1e-5)
        assert len(one.tempered) == len(TEMPERATURES)
        assert one.tempered[TEMPERATURES.index(1.0)] == pytest.approx(one.loss)
    mixed = jobs(fed, batched, tempered=False)[:1] + jobs(fed, batched)[1:]
    found = batched.evaluate(mixed)
    assert found[0].tempered == ()
    assert found[1].tempered != ()


def test_other_losses_have_none(engines):
    fed, made = engines

    def one_hot(outputs, targets):
        return squared_error(outputs, torch.nn.functional.one_hot(targets, 3).float())

    for kind in (BatchedEngine, ReferenceEngine):
        engine = made(kind, one_hot)
        assert {m.tempered for m in engine.evaluate(jobs(fed, engine))} == {()}
    one_hot.takes_logits = True
    engine = made(BatchedEngine, one_hot)
    assert all(m.tempered for m in engine.evaluate(jobs(fed, engine)))


def test_evaluators_are_asked_only_by_calibrated_rules(monkeypatch):
    asked = []
    made = Evaluate.__init__
    monkeypatch.setattr(
        Evaluate, "__init__", lambda self, *a, **k: (made(self, *a, **k), asked.append(self.tempered))[0]
    )
    fed = Synth(priority=2, free=3, samples=60).federation(seed=0)
    for calibrated in (False, True):
        asked.clear()
        fa.simulate(fed, lambda: torch.nn.Linear(60, 10), rule=fa.Verified(calibrated=calibrated), rounds=3)
        assert any(asked) == calibrated
