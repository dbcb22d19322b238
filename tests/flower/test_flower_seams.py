"""Aggregators, update steps, optimisers, rules and users' own classes over Flower, each against the simulation."""

import importlib
import importlib.util
import math
import re
import sys
import types

import in_process
import numpy as np
import pytest
import torch
from in_process import DATA, arrays_of, history, weights

import fedalign as fa
from fedalign.flower import ClientData
from fedalign.simulation.engine.layout import Layout

federation, keys = in_process.federation, in_process.keys
NO_SHORT = {"epochs": None, "batch_size": None}
HERE = __name__
SGD = fa.LocalSGD(lr=0.1, epochs=2, batch_size=20)


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


class Notes(fa.Callback):
    """Notes what it hears, in ``kept`` under its own name."""

    kept = {}  # noqa: RUF012

    def __init__(self, name="flower"):
        self.told = Notes.kept[name] = []

    def on_start(self, run):
        self.told.append(("start", run.seed, run.rounds, run.start))

    def on_round(self, record, model):
        total = float(sum(p.detach().abs().sum() for p in model.parameters()))
        self.told.append(("round", record.round, record.admitted, model.training, round(total, 3)))

    def on_end(self, result):
        self.told.append(("end", len(result.history), [tuple(p.shape) for p in result.model.parameters()]))


def dropout_model():
    layers = torch.nn.Linear(60, 20), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(20, 10)
    return torch.nn.Sequential(*layers)


def regression_model():
    return torch.nn.Sequential(torch.nn.Linear(60, 1), torch.nn.Flatten(0))


def clients(change):
    """Give all clients' data; ``change`` is of one split of one client, with its number."""
    federation = DATA.federation(seed=0)
    return [{s: change(k, *xy) for s, xy in arrays_of(federation, k).items()} for k in range(6)]


def giant_clients():
    return clients(lambda k, x, y: (x * 1000 if k == 5 else x, y))


def regression_clients():
    return clients(lambda k, x, y: (x, (y / 5 - 1).float()))


def giant_data(node_config):
    return ClientData(**giant_clients()[int(node_config["partition-id"])])


def regression_data(node_config):
    return ClientData(**regression_clients()[int(node_config["partition-id"])])


def as_federation(parts):
    splits = ([client[split] for client in parts] for split in ("train", "heldout", "test"))
    return fa.Federation.from_arrays(*splits, priority=[k < 2 for k in range(6)], heldout_fraction=0)


def assert_as_simulated(server, tmp_path, rule, data=None, model=in_process.model, local=SGD, **options):
    """Run over Flower and in a simulation: the same decisions, shares and traffic in every round, the same weights."""
    server().run()
    data = DATA.federation(seed=0) if data is None else data
    expected = fa.simulate(data, model, rule, 5, 0.1, local, device="cpu", **options)
    rounds = history(tmp_path)
    assert len(rounds) == 5
    for mine, theirs in zip(rounds, expected.history.rounds, strict=True):
        assert [c.decision for c in mine.clients] == [c.decision for c in theirs.clients]
        # Some rules weigh clients by their updates, so that rounding errors of five rounds show in the shares.
        assert [c.weight for c in mine.clients] == pytest.approx([c.weight for c in theirs.clients], abs=5e-5)
        assert mine.test_loss == pytest.approx(theirs.test_loss, rel=1e-4)
        assert [t.admitted for t in mine.tried] == [t.admitted for t in theirs.tried]
    for key, value in expected.model.state_dict().items():
        assert torch.allclose(weights(tmp_path)[key], value, atol=1e-5)
    return rounds, expected.history.rounds


def words_and_numbers(reasons):
    """Split reasons into their words, to be compared exactly, and their numbers, to be compared as numbers."""
    number = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")
    return [number.sub("#", r) for r in reasons], [float(n) for r in reasons for n in number.findall(r)]


def assert_same_reasons(mine, theirs):
    words, numbers = words_and_numbers(mine)
    their_words, their_numbers = words_and_numbers(theirs)
    assert words == their_words
    assert numbers == pytest.approx(their_numbers, rel=1e-2, abs=1e-3)


def decisions(rounds):
    return {c.decision for r in rounds for c in r.clients if not c.priority and not r.warmup}


@pytest.mark.parametrize(("name", "rule"), [("fedalign", fa.Align(0.6)), ("auto", fa.AutoAlign())])
@pytest.mark.parametrize(
    ("setting", "aggregator"),
    [
        ("median", fa.CoordinateMedian()),
        ("trimmed-mean(trim=0.2)", fa.TrimmedMean(trim=0.2)),
        (f"{HERE}:MidRange", MidRange()),
    ],
)
def test_aggregators(federation, tmp_path, name, rule, setting, aggregator):
    _, server = federation(rule=name, aggregator=setting)
    rounds, _ = assert_as_simulated(server, tmp_path, rule, aggregator=aggregator)
    assert "admitted" in decisions(rounds)


@pytest.mark.parametrize(
    "setting",
    [
        "geometric-median",
        "krum(f=1)",
        "multi-krum(f=1)",
        "centred-clipping",
        "norm-clipping",
        "norm-clipping(length=0.5)",
        "nnm(f=1, then='median')",
        "bucketing(size=2)",
    ],
)
def test_robust_aggregators(federation, tmp_path, setting):
    _, server = federation(rule="fedalign", aggregator=setting, seed=5)  # buckets are drawn by the seed
    rounds, _ = assert_as_simulated(server, tmp_path, fa.Align(0.6), aggregator=setting, seed=5)
    assert "admitted" in decisions(rounds)


def test_clients_clip_their_updates(federation, tmp_path):
    grid, server = federation(rule="all", client_steps="clip(length=0.5)")
    lengths = []

    def measure(reply, message):
        if "model" in reply.content:
            sent, received = (m.content["model"]["flat"].numpy() for m in (reply, message))
            lengths.append(float(np.linalg.norm(sent - received)))
        return reply

    grid.tamper.update(dict.fromkeys(range(6), measure))
    assert_as_simulated(server, tmp_path, fa.Everyone(), client_steps=[fa.ClipUpdate(length=0.5)])
    assert max(lengths) == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("all", fa.Everyone()),
        ("auto", fa.AutoAlign()),
        ("gradient", fa.GradientAlign()),
        # Its loss is giant as well: with the usual bound a simulation would not choose it, and not train it.
        ("choice(clients=2, most=inf)", fa.PowerOfChoice(clients=2, most=math.inf)),
    ],
)
@pytest.mark.parametrize("settings", [{"longest": 3.0}, {"longest": 0.0, "server_steps": "length-bound(times=3)"}])
def test_a_giant_update_is_refused_with_the_same_reason(federation, tmp_path, name, rule, settings):
    _, server = federation(rule=name, data=f"{HERE}:giant_data", **settings)
    steps = [fa.LengthBound(times=3)]
    mine, theirs = assert_as_simulated(server, tmp_path, rule, as_federation(giant_clients()), server_steps=steps)
    for here, there in zip(mine[1:], theirs[1:], strict=True):
        assert here.clients[5].decision == "refused"
        assert "times as long as the longest of the priority clients" in here.clients[5].reason
        assert_same_reasons([here.clients[5].reason], [there.clients[5].reason])
    assert "admitted" in decisions(mine)


@pytest.mark.parametrize(
    ("setting", "local"),
    [
        ("adam", fa.LocalAdam(lr=0.01, epochs=2, batch_size=20)),
        ("adamw(beta1=0.8)", fa.LocalAdamW(lr=0.01, epochs=2, batch_size=20, beta1=0.8)),
    ],
)
def test_optimizers(federation, tmp_path, setting, local):
    _, server = federation(rule="auto", optimizer=setting, lr=0.01)
    rounds, _ = assert_as_simulated(server, tmp_path, fa.AutoAlign(), local=local)
    assert "admitted" in decisions(rounds)


@pytest.mark.parametrize(("name", "rule"), [("fedalign", fa.Align(0.6)), ("auto", fa.AutoAlign())])
def test_dropout(federation, tmp_path, name, rule):
    _, server = federation(rule=name, model=f"{HERE}:dropout_model")
    rounds, _ = assert_as_simulated(server, tmp_path, rule, model=dropout_model)
    assert "admitted" in decisions(rounds)
    without = fa.simulate(DATA.federation(seed=0), _dropout_off, rule, 5, 0.1, SGD, device="cpu").model.state_dict()
    assert not torch.allclose(weights(tmp_path)["0.weight"], without["0.weight"], atol=1e-3)


def _dropout_off():
    model = dropout_model()
    model[2].p = 0.0
    return model


def test_another_loss(federation, tmp_path):
    _, server = federation(
        rule="fedalign", loss="squared-error", lr=0.01, data=f"{HERE}:regression_data", model=f"{HERE}:regression_model"
    )
    assert_as_simulated(
        server,
        tmp_path,
        fa.Align(0.6),
        as_federation(regression_clients()),
        regression_model,
        fa.LocalSGD(lr=0.01, epochs=2, batch_size=20),
        loss=fa.squared_error,
    )
    assert all(r.test_accuracy is None for r in history(tmp_path))


def test_matching_on_accuracy_needs_classes(federation):
    settings = {"data": f"{HERE}:regression_data", "model": f"{HERE}:regression_model", "loss": "squared-error"}
    _, server = federation(rule="fedalign", match="accuracy", **settings)
    with pytest.raises(fa.FedalignError, match=r"paused before round 0: .*not connected: site-0, site-1"):
        server().run()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("gradient(threshold=0.1)", fa.GradientAlign(threshold=0.1)),
        ("trust", fa.TrustWeighted()),
        ("choice(clients=2)", fa.PowerOfChoice(clients=2)),
        ("weighted(power=2.0)", fa.LossWeighted(power=2.0)),
        ("fedalign(epsilon=0.6, match_on='train')", fa.Align(0.6, match_on="train")),
        (f"{HERE}:Half", Half()),
    ],
)
def test_rules(federation, tmp_path, name, rule):
    _, server = federation(rule=name, **{"free-cap": 100.0})  # a simulation has no cap, and `weighted` would meet it
    mine, theirs = assert_as_simulated(server, tmp_path, rule)
    assert "admitted" in decisions(mine)
    assert_same_reasons([c.reason for r in mine for c in r.clients], [c.reason for r in theirs for c in r.clients])


def test_a_tracker_hears_the_same(federation, tmp_path):
    Notes.kept.clear()
    _, server = federation(rule=f"{HERE}:Half", trackers=f"{HERE}:Notes; {HERE}:Notes(name='second')")
    assert_as_simulated(server, tmp_path, Half(), callbacks=[Notes("simulated")])
    assert [what for what, *_ in Notes.kept["flower"]] == ["start", *["round"] * 5, "end"]
    assert Notes.kept["flower"] == Notes.kept["second"] == Notes.kept["simulated"]


def test_tensorboard_writes_into_the_run_s_folder(federation, tmp_path):
    pytest.importorskip("tensorboard", reason="the extra fedalign[tensorboard] is not installed")
    _, server = federation(rule="all", rounds=1, trackers="tensorboard")
    server().run()
    assert list((tmp_path / "out" / "tensorboard").glob("events.*"))


def test_a_wrong_tracker_leaves_no_folder(federation, tmp_path):
    _, server = federation(trackers="tensorbord")
    with pytest.raises(fa.FedalignError, match=r"trackers.*tensorbord.*did you mean 'tensorboard'"):
        server()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "name", "options"), [("median", "Median", {}), ("trimmed-mean(trim=1)", "TrMean", {"f": 1})]
)
def test_robust_aggregates_are_those_of_byzfl(federation, tmp_path, monkeypatch, setting, name, options):
    grid, server = federation(rule="all", rounds=1, warmup=0.0, aggregator=setting)
    received = {}

    def keep(reply, message):
        if "model" in reply.content:
            received[message.metadata.dst_node_id] = reply.content["model"]["flat"].numpy()
        return reply

    grid.tamper.update(dict.fromkeys(range(6), keep))
    server().run()
    assert len(received) == 6
    expected = getattr(_byzfl(monkeypatch), name)(**options)(np.stack(list(received.values())))
    module = in_process.model()
    module.load_state_dict(weights(tmp_path))
    assert np.allclose(Layout(module).flatten(module).numpy(), expected, atol=1e-6)


def _byzfl(monkeypatch):
    """Import byzfl's aggregators alone: the whole package needs torchvision."""
    found = importlib.util.find_spec("byzfl")
    if found is None:
        pytest.skip("byzfl is not installed: pip install --no-deps byzfl")
    package = types.ModuleType("byzfl")
    package.__path__ = list(found.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "byzfl", package)
    return importlib.import_module("byzfl.aggregators.aggregators")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "sgd(scaffold=true)", "trust": "verify"}, "SCAFFOLD cannot be combined with a verified rule"),
        ({"rule": "auto", "local": "sgd(lr=0.1, epochs=1, scaffold=true)", **NO_SHORT}, "combined with AutoAlign"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum is set, but the optimizer 'adam' has no such option"),
        ({"optimizer": "adm"}, "optimizer is 'adm'; did you mean 'adam'"),
        ({"aggregator": "medan"}, "aggregator is 'medan'; did you mean 'median'"),
        ({"aggregator": "trimmed-mean(trim=0.7)"}, "trim must be a fraction below 0.5"),
        ({"client_steps": "clip"}, "length"),
        ({"server_steps": "length-bound(time=3)"}, "did you mean 'times'"),
        ({"rule": "local"}, "which has no server"),
        ({"rule": f"{HERE}:Haf"}, "has no 'Haf'; did you mean 'Half'"),
        ({"rule": f"{HERE}:MidRange"}, "not a rule"),
        ({"loss": "square-error"}, "did you mean 'squared-error'"),
    ],
)
def test_settings_of_the_seams_are_checked(federation, settings, message):
    _, server = federation(**settings)
    with pytest.raises(fa.FedalignError, match=message):
        server()
