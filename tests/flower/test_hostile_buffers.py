"""Over Flower: hostile buffers are refused, and no model with a loss that is not finite becomes a checkpoint."""

import in_process
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from in_process import history
from torch import nn

import fedalign as fa
from fedalign.aggregation import buffer_checks
from fedalign.experiments.store import RunStore
from fedalign.flower import ClientData
from fedalign.simulation.engine.layout import Layout

federation, keys = in_process.federation, in_process.keys
NORMALISED, UNTESTED = "test_hostile_buffers:normalised", "test_hostile_buffers:untested"


def normalised():
    return nn.Sequential(nn.Linear(60, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def untested(node_config):
    """Give a node its data without test samples."""
    parts = in_process.arrays_of(in_process.DATA.federation(seed=0), int(node_config["partition-id"]))
    return ClientData(train=parts["train"], heldout=parts["heldout"])


def negative_variance(reply, message):
    if "model" in reply.content:
        flat = reply.content["model"]["flat"].numpy().copy()
        flat[Layout(normalised()).places["1.running_var"]] = -1e3
        reply.content["model"] = ArrayRecord({"flat": Array(flat)})
        reply.content["measures"]["own.loss"] = float(message.content["task"]["loss"])
    return reply


def from_round(first, tamper):
    def change(reply, message):
        late = "model" in reply.content and int(message.content["task"]["round"]) >= first
        return tamper(reply, message) if late else reply

    return change


@pytest.mark.parametrize("rule", ["all", "fedalign", "gradient", "trust", "auto"])
def test_a_negative_variance_is_refused_and_the_run_goes_on(federation, tmp_path, rule):
    grid, server = federation(model=NORMALISED, rule=rule, rounds=3, warmup=0.0)
    grid.tamper[5] = negative_variance
    server().run()
    for record in history(tmp_path):
        assert record.clients[5].decision == "refused"
        assert record.clients[5].reason == "its running variance in the layer 1 is negative: -1e+03"
        assert np.isfinite(record.test_loss)


@pytest.mark.parametrize("data", ["in_process:data", UNTESTED])
@pytest.mark.parametrize("last", [False, True])
def test_a_model_whose_loss_is_not_finite_is_no_checkpoint(federation, tmp_path, monkeypatch, data, last):
    monkeypatch.setattr(buffer_checks, "_wrong_layer", lambda own, priority: None)  # something that passes the checks
    rounds = 3 if last else 5
    grid, server = federation(model=NORMALISED, data=data, rule="all", rounds=rounds, warmup=1 / rounds, repeats=1)
    grid.tamper[5] = from_round(2, negative_variance)
    with pytest.raises(fa.FedalignError, match=r"paused before round 2: the round's model has a loss .* not finite"):
        server().run()
    (newest, *_), notes = RunStore(tmp_path / "out").checkpoints()
    assert not notes
    assert newest.rounds == 2
    assert all(torch.isfinite(tensor).all() for tensor in newest.snapshot.tensors.values())
    # Without the attacker it goes on, and ends as if that one had left in time.
    nodes = {k: {"partition-id": k} for k in range(5)}
    again = {"model": NORMALISED, "data": data, "rule": "all", "rounds": rounds, "resume": str(tmp_path / "out")}
    federation(nodes, **again, warmup=1 / rounds)[1]().run()
    assert len(history(tmp_path)) == rounds
    assert [r.clients[5].decision for r in history(tmp_path)] == ["absent", "admitted"] + ["absent"] * (rounds - 2)
    assert all(np.isfinite(r.global_loss) for r in history(tmp_path))
