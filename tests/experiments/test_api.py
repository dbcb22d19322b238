"""fa.Experiment and fa.run: from Python what the command line gives."""

import functools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import blobs, federation, flat, interrupted_before, linear
from torch import nn

import fedalign as fa
from fedalign import cli
from fedalign.registry import MODELS, RULES
from fedalign.settings.description import describe
from fedalign.settings.fingerprint import fingerprint

MODULE = """
    import torch
    import fedalign as fa

    class Net(torch.nn.Module):
        def __init__(self, inputs: int, hidden: int = 8) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(inputs, hidden), torch.nn.Linear(hidden, 3))
        def forward(self, x):
            return self.layers(x)

    class Half(fa.Rule):
        def __init__(self, share: float = 0.5) -> None:
            self.share = share
        def offers(self, own, broadcast):
            return own.loss <= 2 * broadcast.loss
        def select(self, offers, broadcast):
            return fa.Selection(tuple(offers)[: round(self.share * len(offers))])

    def falling(t, start=0.5):
        return start / (t + 1)

    class Saw(fa.Schedule):
        def __init__(self, high: float) -> None:
            self.high = high
        def at(self, t, total):
            return self.high * (t % 2)

    def loss(outputs, targets):
        return 2 * fa.cross_entropy(outputs, targets)

    def data(seed: int):
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(4, 40, 5, generator=draw)
        y = (x[..., 0] > 0).long() + (x[..., 1] > 0)
        return fa.Federation.from_arrays(list(zip(x, y)), priority=[True, True, False, False], test_fraction=0.25)
"""


@pytest.fixture
def own(monkeypatch):
    """Give a module of the user's own, beside the files of the experiment."""
    Path("own_module.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(Path.cwd())
    import own_module

    yield own_module
    sys.modules.pop("own_module")


def mine(most):
    """Make a rule whose class cannot be imported, as that of a script."""

    class Mine(fa.Rule):
        def __init__(self):
            self.most = most

        def offers(self, own, broadcast):
            return True

        def select(self, offers, broadcast):
            return fa.Selection(tuple(offers)[: self.most])

    return Mine()


def live(most=1, factor=1.0, rounds=4, **settings):
    """Give an experiment of objects that no settings file can describe."""
    arms = {"priority": None, "mine": {"rule": mine(most), "lr": 0.05}, "wide": fa.Align(epsilon=9.0)}
    loss = lambda outputs, targets: factor * fa.cross_entropy(outputs, targets)  # noqa: E731
    return fa.Experiment(federation(), lambda: linear(), arms, rounds=rounds, seeds=2, loss=loss, **settings)


def test_live_objects_run_store_and_report():
    result = fa.run(live(name="live"), device="cpu")
    assert result.folder == Path("runs/live")
    assert json.loads((result.folder / "summary.json").read_text()) == result.summary
    assert (result.folder / "report.html").is_file()
    assert result.arms == ["priority", "mine", "wide"]
    assert result.seeds == [0, 1]
    assert result["mine", 1].history[3].admitted == 1
    assert result["wide", 0].history[3].admitted == 3
    assert "wide" in str(result)
    assert set(result.to_frame()["arm"]) == {"priority", "mine", "wide"}
    module = result["mine", 0].model()
    assert isinstance(module, nn.Linear)
    assert not module.training
    local, loss = fa.LocalSGD(0.05, epochs=5), lambda outputs, targets: fa.cross_entropy(outputs, targets)
    alone = fa.simulate(federation(), linear, mine(1), 4, local=local, loss=loss, device="cpu")
    assert torch.equal(flat(alone.model), flat(module))
    assert fa.run(live(name="live"), report=False, device="cpu").folder == Path("runs/live-2")
    again = fa.ExperimentResult.read("runs/live")
    assert again.summary == result.summary


def test_live_objects_resume_exactly_and_others_are_refused(monkeypatch):
    whole = fa.run(live(), "whole", report=False, device="cpu")
    with interrupted_before(monkeypatch, 2), pytest.raises(KeyboardInterrupt):
        fa.run(live(), "cut", report=False, device="cpu")
    cut = fa.run(live(), "cut", resume=True, report=False, device="cpu")
    for arm in whole.arms:
        for file in ("rounds.jsonl", "model.safetensors"):
            assert (whole[arm, 1].folder / file).read_bytes() == (cut[arm, 1].folder / file).read_bytes()
    with pytest.raises(fa.FedalignError, match=r"cut was run with another arm\.mine: .* fingerprint was"):
        fa.run(live(most=2), "cut", resume=True)
    with pytest.raises(fa.FedalignError, match="cut was run with another loss"):
        fa.run(live(factor=2.0), "cut", resume=True)
    assert fa.run(live(), "cut", resume="auto", report=False).histories == whole.histories
    assert cli.main(["run", "cut/config.toml", "--quiet"]) == 2


def test_the_command_line_says_who_has_the_objects(capsys):
    fa.run(live(rounds=1), "out", report=False, device="cpu")
    assert cli.main(["run", "out/config.toml", "--quiet"]) == 2
    assert "was given in Python" in capsys.readouterr().err
    assert cli.main(["report", "out"]) == 0


def described(own, **settings):
    arms = {
        "priority": None,
        "auto": None,
        "half": own.Half(0.7),
        "wide": fa.Align(epsilon=fa.Linear(1.0, 0.1), on="accuracy"),
        "careful": {"rule": fa.Verified(length=3.0), "warmup": 2},
        "text": "weighted(power=2.0)",
    }
    return fa.Experiment(
        own.data,
        functools.partial(own.Net, 5, hidden=6),
        arms,
        name="described",
        rounds=4,
        seeds=2,
        loss=own.loss,
        local=fa.LocalAdam(lr=0.01, steps=3, batch_size=None),
        participation=fa.Bernoulli(0.8),
        server=fa.FedAdam(lr=0.05),
        aggregator=fa.TrimmedMean(trim=0.1),
        client_steps=[fa.ClipUpdate(length=9.0)],
        server_steps=[fa.LengthBound(times=5.0)],
        adversary=fa.Adversary("sign-flip", last=2),
        epsilon=fa.Cosine(0.4, 0.1),
        **settings,
    )


@pytest.mark.slow
def test_written_as_toml_and_read_back_equal(own):
    experiment = described(own)
    read = fa.Experiment.from_toml(experiment.to_toml("described.toml"))
    assert read == experiment
    assert read != fa.experiment("described.toml", {"local.lr": 0.02})
    in_python = fa.run(experiment, "python", report=False, device="cpu")
    assert cli.main(["run", "described.toml", "--out", "toml", "--device", "cpu", "--quiet"]) == 0
    for arm in in_python.arms:
        for file in ("rounds.jsonl", "model.safetensors"):
            name = f"{arm}/seed-1/{file}"
            assert Path("python", name).read_bytes() == Path("toml", name).read_bytes()
    assert Path("python/config.toml").read_bytes() == Path("toml/config.toml").read_bytes()
    assert isinstance(fa.ExperimentResult.read("python")["half", 0].model(), own.Net)


def test_live_objects_are_not_written():
    with pytest.raises(fa.FedalignError, match="loss is an object that was given in Python"):
        live().to_toml("live.toml")


def test_shipped_experiments_and_names():
    result = fa.run("synth-low", "out", rounds=2, seeds=1, arms=["priority", "local"], report=False, device="cpu")
    assert result.experiment == fa.experiment("synth-low", rounds=2, seeds=1, arms=["priority", "local"])
    models = result["local", 0].model()
    assert set(models) == {c.name for c in result["local", 0].history[0].clients}
    assert result["priority", 0].model().training is False


def test_full_batch_and_engine_in_a_file():
    x, y = blobs(30, 1)
    fed = fa.Federation.from_arrays([(x, y), (x, y)], priority=[True, False])
    settings = {"kind": "sgd", "lr": 0.1, "epochs": 2, "batch_size": "full"}
    experiment = fa.Experiment(
        fed, linear, ["priority"], rounds=1, seeds=1, local=settings, engine="reference", chunk=3
    )
    assert experiment.local("priority").batch_size is None
    assert fa.run(experiment, "out", report=False)["priority", 0].history[0].samples == 2 * 24


def test_sizes_come_from_the_data():
    experiment = fa.Experiment(federation(), "mlp(hidden=[5])", ["priority"])
    assert experiment.settings["model"] == {"kind": "mlp", "inputs": 6, "hidden": [5], "classes": 4}


class Refuser(fa.Callback):
    def on_round(self, record, model):
        raise AssertionError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fa.Experiment(5, linear), "data must be a Federation"),
        (lambda: fa.Experiment(federation(), 5), "model must be a module"),
        (lambda: fa.Experiment(federation(), linear, {"mine": 5}), "an arm must be a rule"),
        (lambda: fa.Experiment(federation(), linear, ["prioriti"]), "did you mean 'priority'"),
        (lambda: fa.Experiment(federation(), linear, round=5), "did you mean 'rounds'"),
        (lambda: fa.Experiment(federation(), linear, epsilon=lambda t: 0.1), "give it to a rule"),
        (lambda: fa.Experiment.from_toml("none.toml"), "there is no file none.toml"),
        (lambda: fa.experiment("synth-lo"), "did you mean 'synth-low'"),
        (lambda: fa.run(live(), "out", rounds=5), "rounds is a setting of the experiment"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(fa.FedalignError, match=message):
        make()


def test_results_say_what_there_is():
    result = fa.run(live(rounds=1), "out", report=False)
    with pytest.raises(fa.FedalignError, match="did you mean 'mine'"):
        result["mein", 0]
    with pytest.raises(fa.FedalignError, match="no seed 7; known: 0, 1"):
        result["mine", 7]


def test_the_table_is_plain_text_where_colours_are_forced(monkeypatch):
    """As in a notebook, whose kernel sets this variable."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = fa.run("synth-low", "out", rounds=1, seeds=1, arms=["priority"], report=False)
    assert "priority" in str(result)
    assert "\x1b" not in str(result)


def test_fingerprints_tell_objects_apart():
    def adds(n):
        return lambda x: x + n

    assert fingerprint(adds(1)) == fingerprint(adds(1))
    assert fingerprint(adds(1)) != fingerprint(adds(2))
    assert fingerprint(mine(1)) == fingerprint(mine(1))
    assert fingerprint(mine(1)) != fingerprint(mine(2))
    assert fingerprint(federation()) == fingerprint(federation())
    assert fingerprint(federation()) != fingerprint(federation(sizes=(40, 25, 60, 33, 19)))
    half, texts = torch.ones(3, dtype=torch.bfloat16), ["a", "b"]
    assert fingerprint(half) == fingerprint(half.clone()) != fingerprint(2 * half)
    assert fingerprint(np.array(texts, object)) == fingerprint(np.array(["a", "b"], object))
    torch.manual_seed(0)
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert fingerprint(one) != fingerprint(other)
    other.load_state_dict(one.state_dict())
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize("name", [name for name in RULES.entries if name != "choice"])
def test_every_built_in_rule_is_described(name):
    rule = RULES.make({"kind": name})
    table = describe(RULES, rule)
    assert table is not None
    assert table["kind"] == name


def test_what_cannot_be_described():
    assert describe(MODELS, lambda: linear()) is None
    assert describe(RULES, mine(1)) is None


def test_runs_start_from_the_weights_of_a_file():
    first = fa.run(fa.Experiment(federation(), linear, ["priority"], rounds=2, seeds=1), "first", report=False)
    file = str(first["priority", 0].folder / "model.safetensors")
    settings = {"rounds": 1, "seeds": 2, "warmup": 0, "start": file}
    later = fa.run(fa.Experiment(federation(), linear, ["priority"], **settings), "later", report=False)
    began = [later["priority", seed].history[0].global_loss for seed in (0, 1)]
    assert began[0] == began[1] < first["priority", 0].history[0].global_loss
    with pytest.raises(fa.FedalignError, match="do not fit the model"):
        fa.run(fa.Experiment(federation(), "mlp(hidden=[5])", ["priority"], **settings), "other", report=False)
    with pytest.raises(fa.FedalignError, match="no such file"):
        fa.Experiment(federation(), linear, start="none")


def test_schedules_of_the_users_own(own):
    Path("e.toml").write_text(
        """
        rounds = 3
        seeds = 1
        arms = ["fedalign", "saw"]
        epsilon = { schedule = "own_module:falling", start = 3.0 }
        [arm.saw]
        rule = "fedalign"
        epsilon = { schedule = "own_module:Saw", high = 2.0 }
        [data]
        kind = "own_module:data"
        [model]
        kind = "logistic"
        [local]
        lr = { schedule = "own_module:falling" }
        epochs = 1
        """
    )
    result = fa.run("e.toml", "out", report=False)
    assert [r.epsilon for r in result["fedalign", 0].history.rounds] == [3.0, 1.5, 1.0]
    assert [r.epsilon for r in result["saw", 0].history.rounds] == [0.0, 2.0, 0.0]
    arms = {"fedalign": fa.Align(epsilon=own.falling)}
    experiment = fa.Experiment(own.data, "logistic", arms, local=fa.LocalSGD(own.falling, epochs=1), rounds=3)
    assert fa.Experiment.from_toml(experiment.to_toml("f.toml")) == experiment
    for text, message in (
        ("falls", "has no 'falls'; did you mean 'falling'"),
        ("loss", "cannot be computed in round 0"),
    ):
        with pytest.raises(fa.FedalignError, match=message):
            fa.experiment("e.toml", {"epsilon": {"schedule": f"own_module:{text}"}})


@pytest.mark.slow
def test_fingerprints_are_the_same_in_another_process():
    script = """
import numpy as np, torch, fedalign as fa
from fedalign.settings.fingerprint import fingerprint
N = 3
class Net(torch.nn.Module):
    names = {"a", "b", "c", "d"}
    def forward(self, x):
        return {1, 2, 3} if x in ("u", "v") else N
x = np.arange(12.0).reshape(6, 2)
fed = fa.Federation.from_arrays([(x, np.arange(6) % 2)] * 2, priority=[True, False])
print(fingerprint(fed), fingerprint(lambda: Net()), fingerprint(Net()), fingerprint({"k": frozenset("xyz")}))
"""
    Path("script.py").write_text(script)
    found = {
        subprocess.run(
            [sys.executable, "script.py"], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
