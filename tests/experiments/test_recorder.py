"""Checkpoints of a simulation: the last good round stays the one to go on from."""

import dataclasses
import math

import pytest
import torch
from conftest import blobs, linear
from conftest import federation as made
from torch import nn

import fedalign as fa
from fedalign.experiments.recorder import Recorder
from fedalign.experiments.store import RunStore
from fedalign.protocol.messages import Snapshot


def deep():
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))


def diverging(round):
    return 0.05 if round < 3 else 1e25


@pytest.mark.parametrize("every", [1, 2, 100])
@pytest.mark.parametrize("rule", [fa.Everyone(), fa.Align(0.5), fa.PriorityOnly()])
def test_a_model_whose_loss_is_not_finite_is_no_checkpoint(tmp_path, rule, every):
    store, fed = RunStore(tmp_path), made()
    local = fa.LocalSGD(lr=diverging, steps=1, batch_size=10)
    with pytest.raises(fa.DivergedError, match=r"round 4 .* the model's loss is not finite") as error:
        fa.simulate(fed, deep, rule, 6, 0, local, device="cpu", callbacks=[Recorder(store, fed, 6, every)])
    assert not math.isfinite(error.value.history[3].test_loss)
    assert len(store.history()) == 4
    (newest, *_), notes = store.checkpoints()
    assert not notes
    assert newest.rounds == 3
    assert newest.last.test_loss < 10


def test_weights_that_are_not_finite_are_no_checkpoint(tmp_path):
    store, fed = RunStore(tmp_path), fa.Federation.from_arrays([blobs(40, 0), blobs(30, 1)], priority=[True, False])
    result = fa.simulate(fed, linear, fa.Everyone(), 2, 0, device="cpu")
    recorder = Recorder(store, fed, 2)
    for record, number in zip(result.history.rounds, (0.5, torch.inf), strict=True):
        snapshot = Snapshot(record.round + 1, {"model": torch.full((3,), number), "momentum": torch.zeros(3)})
        recorder.on_snapshot(dataclasses.replace(record, test_loss=None), snapshot)
    recorder.close()
    assert [point.rounds for point in store.checkpoints()[0]] == [1]
