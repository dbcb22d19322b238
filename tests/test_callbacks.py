"""Callbacks: what they hear, in which order, and what they are given."""

from dataclasses import replace

import pytest
import torch
from conftest import federation, flat, linear
from torch import nn

import fedalign as fa
from fedalign.experiments.config import load
from fedalign.experiments.runner import execute, prepare
from fedalign.experiments.store import RunStore
from fedalign.protocol.messages import Snapshot

LOCAL = fa.LocalSGD(lr=0.05, epochs=1, batch_size=10)


def normalised():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 4))


class Diary(fa.Callback):
    """Writes down everything that it hears."""

    def __init__(self):
        self.heard, self.models, self.snapshots = [], [], []

    def on_start(self, run):
        self.run = run
        self.heard.append("start")

    def on_round(self, record, model):
        self.heard.append(f"round {record.round}")
        self.models.append(model)

    def on_snapshot(self, record, snapshot):
        self.heard.append(f"snapshot {record.round}")
        self.snapshots.append(snapshot)

    def on_error(self, error):
        self.heard.append(f"error {error.round}")

    def on_end(self, result):
        self.heard.append("end")
        self.result = result

    def close(self):
        self.heard.append("close")


def run(callbacks, rounds=3, make=linear, rule=None, **options):
    return fa.simulate(
        federation(), make, rule or fa.Align(0.3), rounds, 0, LOCAL, device="cpu", callbacks=callbacks, **options
    )


def test_the_order():
    diary = Diary()
    result = run([diary], rounds=2, seed=7)
    assert diary.heard == ["start", "round 0", "snapshot 0", "round 1", "snapshot 1", "end", "close"]
    assert (diary.run.seed, diary.run.rounds, diary.run.start, diary.run.last) == (7, 2, 0, None)
    assert diary.result is result
    assert [snapshot.round for snapshot in diary.snapshots] == [1, 2]
    assert all(isinstance(snapshot, Snapshot) for snapshot in diary.snapshots)


@pytest.mark.parametrize("engine", ["batched", "reference"])
@pytest.mark.parametrize("rule", [fa.Align(0.3), fa.AutoAlign()])
def test_the_module_is_the_served_model(engine, rule):
    """In eval mode, with BatchNorm's statistics, it gives the test accuracy of the record."""
    diary, fed = Diary(), federation()
    options = {"device": "cpu", "engine": engine, "callbacks": [diary]}
    result = fa.simulate(fed, normalised, rule, 4, 0, LOCAL, **options)
    for record, module in zip(result.history.rounds, diary.models, strict=True):
        assert not any(part.training for part in module.modules())
        assert (module[1].num_batches_tracked if module[1].num_batches_tracked is not None else 1) > 0
        assert not torch.equal(module[1].running_mean, torch.zeros(5))
        total = accuracy = 0.0
        for k, client in enumerate(fed.clients):
            if client.priority:
                x, y = fed.pool.x[client.test], fed.pool.y[client.test]
                with torch.no_grad():
                    right = (module(x.float()).argmax(1) == y).double().mean()
                accuracy += float(fed.p[k]) * float(right)
                total += float(fed.p[k])
        assert record.test_accuracy == pytest.approx(accuracy / total, abs=1e-6)
    assert torch.equal(flat(diary.models[-1]), flat(result.model))
    assert len({id(module) for module in diary.models}) == 4  # each may be kept


def test_alone_gives_a_module_for_each_client():
    diary = Diary()
    result = run([diary], rule=fa.Alone())
    assert [len(models) for models in diary.models] == [5, 5, 5]
    assert all(torch.equal(flat(a), flat(b)) for a, b in zip(diary.models[-1], result.model, strict=True))


def test_a_callback_that_needs_no_model_gets_none(monkeypatch):
    class Quiet(Diary):
        needs_model = False

    built = []
    original = fa.simulation.simulation.Simulation.module

    def module(self, given):
        built.append(1)
        return original(self, given)

    monkeypatch.setattr(fa.simulation.simulation.Simulation, "module", module)
    quiet, diary = Quiet(), Diary()
    run([quiet])
    assert quiet.models == [None] * 3
    assert len(built) == 1  # the result's
    quiet = Quiet()
    run([quiet, diary, Diary()])
    assert quiet.models == [None] * 3
    assert all(isinstance(model, nn.Linear) for model in diary.models)
    assert len(built) == 1 + 3 + 1  # one a round serves all


def test_a_callback_that_replaces_the_record():
    class Noted(fa.Callback):
        needs_model = False
        changes_records = True

        def on_round(self, record, model):
            return replace(record, skipped=f"seen in round {record.round}")

    seen = []

    class After(fa.Callback):
        def on_round(self, record, model):
            seen.append(("round", record.skipped))

        def on_snapshot(self, record, snapshot):
            seen.append(("snapshot", record.skipped))

    given = []
    result = run([Noted(), After()], rounds=2, on_round=lambda done: given.append(done.record))
    expected = ["seen in round 0", "seen in round 1"]
    assert [record.skipped for record in result.history.rounds] == expected
    assert [record.skipped for record in given] == expected
    assert seen == [(what, text) for text in expected for what in ("round", "snapshot")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_close_is_called_after_an_interruption(error):
    diary = Diary()

    class Stop(fa.Callback):
        def on_round(self, record, model):
            if record.round == 1:
                raise error

        def close(self):
            diary.heard.append("the other's close")

    with pytest.raises(error):
        run([diary, Stop()])
    assert diary.heard == ["start", "round 0", "snapshot 0", "round 1", "close", "the other's close"]


def test_every_callback_is_closed_though_one_fails_to():
    class Broken(fa.Callback):
        def close(self):
            raise OSError("disk full")

    diary = Diary()
    with pytest.raises(OSError, match="disk full"):
        run([Broken(), diary])
    assert diary.heard[-1] == "close"


def test_divergence_is_told():
    fed, diary = federation(), Diary()
    fed.pool.x[fed.clients[0].train[:1]] = 1e30  # its outputs differ without bound
    with pytest.raises(fa.DivergedError) as error:
        fa.simulate(fed, linear, fa.Everyone(), 50, 0, fa.LocalSGD(lr=1e30, epochs=2), device="cpu", callbacks=[diary])
    told = error.value.round
    assert diary.heard[-3:] == [f"error {told}", "end", "close"]
    assert diary.result.error is error.value
    assert len(diary.models) == told


def test_callbacks_are_checked():
    with pytest.raises(fa.FedalignError, match=r"callbacks must be a fedalign\.Callback object, not <function"):
        run([lambda record, model: None])


def test_callbacks_of_an_experiment_go_on_after_a_resume(tmp_path, monkeypatch):
    """A factory makes one for each arm and seed. After a resume they hear where the run goes on."""
    change = {"rounds": 4, "seeds": 2, "arms": ["priority", "fedalign"], "data.samples": 20}
    diaries = {}

    def make(arm, seed):
        diaries[arm, seed] = Diary()
        return diaries[arm, seed]

    append = RunStore.append

    def stop(self, record):
        if record.round == 2:
            raise KeyboardInterrupt
        return append(self, record)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            execute(prepare(load("synth-low", change), out, device="cpu", callbacks=[make]))
    assert set(diaries) == {(arm, seed) for arm in ("priority", "fedalign") for seed in (0, 1)}
    assert all(diary.heard[-1] == "close" for diary in diaries.values())
    assert all((diary.run.arm, diary.run.seed) == key for key, diary in diaries.items())
    execute(prepare(load("synth-low", change), out, resume=True, device="cpu", callbacks=[make]))
    for (arm, seed), diary in diaries.items():
        assert (diary.run.start, diary.run.last.round) == (2, 1)
        assert diary.run.folder == out / arm / f"seed-{seed}"
        assert diary.heard == ["start", "round 2", "snapshot 2", "round 3", "snapshot 3", "end", "close"]
