"""One experiment in both ways: simulated, and over Flower's messages with the settings of its app.

It also has what the experiments of ``test_parity.py`` name: rules, losses, models and data of a user's own.
"""

import copy
import functools
import json
from pathlib import Path

import pytest
import torch
from in_process import DATA, arrays_of, history, weights

import fedalign as fa
from fedalign.experiments.config import resolve
from fedalign.experiments.experiment import Experiment
from fedalign.experiments.recorder import client_rows
from fedalign.flower import ClientData
from fedalign.flower.from_experiment import run_settings
from fedalign.flower.run_config import flat
from fedalign.simulation.api import simulate_many

#: The experiment that every case changes in one place; its data are those of ``in_process.DATA``.
EXPERIMENT = {
    "name": "parity",
    "rounds": 4,
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
SEED = EXPERIMENT["seeds"][0]
FIGURES = (
    "epsilon", "global_loss", "global_accuracy", "train_loss", "test_loss", "test_accuracy", "heldout_loss",
    "heldout_accuracy", "samples",
)  # fmt: skip


class Half(fa.Rule):
    """Admits every second offer, beginning with the second."""

    def offers(self, own, broadcast):
        return own.loss <= broadcast.loss + 2

    def select(self, offers, broadcast):
        return fa.Selection(tuple(sorted(offers))[1::2], reasons=dict.fromkeys(offers, "every second offer"))


class MidRange(fa.Aggregator):
    """Half of the largest value and the smallest, in every coordinate."""

    def combine(self, models, shares):
        return (models.amax(0) + models.amin(0)) / 2


class EverySecond(fa.Participation):
    """Lets the free clients with even numbers take part in even rounds, and the others in odd ones."""

    def draw(self, round, roster, seed):
        return fa.Presence(tuple(bool(p or k % 2 == round % 2) for k, p in enumerate(roster.priority)))


def smooth_loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1, reduction="none")


def dropout_model():
    layers = torch.nn.Linear(60, 12), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(12, 10)
    return torch.nn.Sequential(*layers)


def batchnorm_model():
    return torch.nn.Sequential(torch.nn.Linear(60, 12), torch.nn.BatchNorm1d(12), torch.nn.Linear(12, 10))


def bfloat16_model():
    return torch.nn.Linear(60, 10).to(torch.bfloat16)


def frozen_model():
    module = torch.nn.Sequential(torch.nn.Linear(60, 12), torch.nn.Linear(12, 10))
    module[0].requires_grad_(False)
    return module


def one_output():
    return torch.nn.Sequential(torch.nn.Linear(60, 1), torch.nn.Flatten(0))


@functools.cache
def made(seed):
    return DATA.federation(seed)


def regression(seed):
    """Make the federation with a number in place of every class."""
    return _with_targets(seed, lambda y: (y / 5 - 1).float())


def two_classes(seed):
    return _with_targets(seed, lambda y: (y > 4).float())


def _with_targets(seed, change):
    parts = [arrays_of(made(seed), k) for k in range(6)]
    splits = ([(part[s][0], change(part[s][1])) for part in parts] for s in ("train", "heldout", "test"))
    return fa.Federation.from_arrays(*splits, priority=[k < 2 for k in range(6)], heldout_fraction=0)


def data(node_config):
    """Return what a client has in the simulation of the experiment."""
    return ClientData(**arrays_of(made(SEED), int(node_config["partition-id"])))


def regression_data(node_config):
    return ClientData(**arrays_of(regression(SEED), int(node_config["partition-id"])))


def two_class_data(node_config):
    return ClientData(**arrays_of(two_classes(SEED), int(node_config["partition-id"])))


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


def both_ways(federation, tmp_path, change, data="parity:data", resume=False, wire=None, rel=1e-4):
    """Run an experiment over Flower and in a simulation, and compare; gives the records of both.

    With ``resume``, it is run over Flower once more, by a server that dies in the third round and another one that
    resumes. ``wire`` are settings of the messages, ``rel`` the precision of figures.
    """
    settings = resolve(changed(change), Path())
    experiment = Experiment(settings)
    ((_, _, spec),) = experiment.specs()
    (expected,) = simulate_many([spec], experiment.model, device="cpu", **experiment.engine_options())
    config = {**flat(run_settings(settings, "own")), "data": data, **(wire or {})}
    for out, interrupt in {"out": None, **({"resumed": 2} if resume else {})}.items():
        mine = over_flower(federation, tmp_path, config, out, interrupt)
        assert_same(mine, expected.history.rounds, rel)
        assert_same_weights(weights(tmp_path, out), expected.model)
        assert_same_clients(tmp_path / out, client_rows(spec.federation.clients, expected))
        assert (tmp_path / out / "report.html").stat().st_size > 1000
    return mine, expected.history.rounds


def over_flower(federation, tmp_path, config, out="out", interrupt=None):
    """Run a configuration over Flower; with ``interrupt`` the server dies in that round, and another one resumes."""
    own = ("model", "epochs", "batch_size", "epsilon", "trust", "compress", "cache")  # the fixture's, not the app's
    config = {**dict.fromkeys(own), **config, "out": str(tmp_path / out)}
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


def assert_same(mine, theirs, rel=1e-4):
    """Compare the rounds of two runs: who took part, why, with which weight, and what came of it."""
    assert len(mine) == len(theirs)
    for here, there in zip(mine, theirs, strict=True):
        assert [c.decision for c in here.clients] == [c.decision for c in there.clients]
        assert [c.reachable for c in here.clients] == [c.reachable for c in there.clients]
        # Some rules weigh clients by their updates, so that rounding errors of the rounds before show in the shares.
        assert [c.weight for c in here.clients] == pytest.approx([c.weight for c in there.clients], abs=5e-5)
        assert [t.admitted for t in here.tried] == [t.admitted for t in there.tried]
        assert (here.skipped, here.warmup, here.base) == (there.skipped, there.warmup, there.base)
        for name in FIGURES:
            value, wanted = getattr(here, name), getattr(there, name)
            assert (value is None) == (wanted is None), name
            assert value is None or value == pytest.approx(wanted, rel=rel), (name, value, wanted)
        assert here.metrics.keys() == there.metrics.keys()
        for name, values in here.metrics.items():
            assert values.priority == pytest.approx(there.metrics[name].priority, abs=1e-5), name
            assert values.free == pytest.approx(there.metrics[name].free, abs=1e-5), name


def assert_same_weights(mine, model):
    for key, value in model.state_dict().items():
        assert mine[key].dtype == value.dtype
        assert torch.allclose(mine[key].double(), value.double(), atol=1e-5), key


def assert_same_clients(folder, wanted):
    """Compare ``clients.json`` with a simulation's."""
    rows = json.loads((folder / "clients.json").read_text())
    assert len(rows) == len(wanted)
    for mine, theirs in zip(rows, wanted, strict=True):
        measured = {key: theirs[key] for key in ("test_loss", "test_accuracy")}
        close = {key: value and pytest.approx(value, abs=1e-4) for key, value in measured.items()}
        assert mine == {**theirs, "name": f"site-{mine['id']}", **close}
