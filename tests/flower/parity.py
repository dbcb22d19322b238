"""One experiment in both ways: simulated, and over Flower's messages with the settings of its app."""

import copy
import functools

import pytest
import torch
from in_process import DATA, arrays_of, history, weights

from fedalign.experiments.config import resolve
from fedalign.experiments.experiment import Experiment
from fedalign.flower import ClientData
from fedalign.flower.from_experiment import run_settings
from fedalign.flower.run_config import flat
from fedalign.simulation.api import simulate_many

#: The experiment that every case changes in one place; its data are those of ``in_process.DATA``.
EXPERIMENT = {
    "name": "parity",
    "rounds": 5,
    "seeds": [3],
    "warmup": 1,
    "arms": ["own"],
    "epsilon": 0.6,
    "device": "cpu",
    "data": {"kind": "synth", "priority": 2, "free": 4, "samples": 60, "test_samples": 60},
    "model": "logistic",
    "local": {"kind": "sgd", "lr": 0.1, "epochs": 2, "batch_size": 20},
    "arm": {"own": {"rule": "fedalign"}},
}


@functools.cache
def made(seed):
    return DATA.federation(seed)


def data(node_config):
    """Return what a client has in the simulation of the experiment."""
    return ClientData(**arrays_of(made(EXPERIMENT["seeds"][0]), int(node_config["partition-id"])))


class InterruptedRunError(Exception):
    """Ends a server in the middle of a round, as a kill would."""


def changed(change):
    """Return the experiment with a few settings changed, by their dotted names."""
    table = copy.deepcopy(EXPERIMENT)
    for key, value in change.items():
        *parents, last = key.split(".")
        inner = table
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return table


def both_ways(federation, tmp_path, change, folder=None, data="parity:data"):
    """Run an experiment over Flower and in a simulation, and compare; gives the records of both."""
    settings = resolve(changed(change), folder)
    expected = simulated(settings, folder)
    config = {**flat(run_settings(settings, "own")), "data": data}
    mine = over_flower(federation, tmp_path, config)
    assert_same(mine, expected.history.rounds)
    assert_same_weights(weights(tmp_path), expected.model)
    resumed = over_flower(federation, tmp_path, config, "resumed", interrupt=3)
    assert_same(resumed, expected.history.rounds)
    assert_same_weights(weights(tmp_path, "resumed"), expected.model)
    return mine, expected.history.rounds


def simulated(settings, folder=None):
    experiment = Experiment(settings, folder)
    ((_, _, spec),) = experiment.specs()
    (result,) = simulate_many([spec], experiment.model, loss=experiment.loss, device="cpu")
    return result


def over_flower(federation, tmp_path, config, out="out", interrupt=None):
    """Run a configuration over Flower; with ``interrupt`` the server dies in that round, and another one resumes."""
    short = dict.fromkeys(("model", "epochs", "batch_size", "epsilon", "trust"))  # the fixture's own
    config = {**short, **config, "out": str(tmp_path / out)}
    if interrupt is not None:
        grid, server = federation(**config)

        def die(reply, message):
            if message.metadata.message_type == "train" and message.content["task"]["round"] == interrupt:
                raise InterruptedRunError
            return reply

        grid.tamper.update(dict.fromkeys(range(6), die))
        with pytest.raises(InterruptedRunError):
            server().run()
        assert len(history(tmp_path, out)) == interrupt
        config = {**config, "resume": str(tmp_path / out)}
    _, server = federation(**config)
    server().run()
    return history(tmp_path, out)


def assert_same(mine, theirs):
    """Compare the rounds of two runs: who took part, why, with which weight, and what came of it."""
    assert len(mine) == len(theirs)
    for here, there in zip(mine, theirs, strict=True):
        assert [c.decision for c in here.clients] == [c.decision for c in there.clients]
        assert [c.reachable for c in here.clients] == [c.reachable for c in there.clients]
        # Some rules weigh clients by their updates, so that rounding errors of the rounds before show in the shares.
        assert [c.weight for c in here.clients] == pytest.approx([c.weight for c in there.clients], abs=5e-5)
        assert [t.admitted for t in here.tried] == [t.admitted for t in there.tried]
        assert (here.skipped, here.warmup, here.base) == (there.skipped, there.warmup, there.base)
        for name in ("epsilon", "global_loss", "test_loss", "test_accuracy"):
            value, wanted = getattr(here, name), getattr(there, name)
            assert (value is None) == (wanted is None), name
            assert value is None or value == pytest.approx(wanted, rel=1e-4), name


def assert_same_weights(mine, model):
    for key, value in model.state_dict().items():
        assert torch.allclose(mine[key].double(), value.double(), atol=1e-5), key
