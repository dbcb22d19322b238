"""Experiments whose rule, model, loss and data are the user's own, from a module beside the TOML file."""

from __future__ import annotations

import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

import fedalign as fa
from fedalign import cli
from fedalign.experiments.config import load
from fedalign.experiments.store import RunStore
from fedalign.flower.settings import Settings
from fedalign.settings import user_modules
from fedalign.theory.setting import check_settings

MINE = """
from dataclasses import dataclass

import torch
import fedalign as fa
from fedalign.data.synth import Synth


@dataclass(frozen=True)
class Half(fa.Align):
    share: float = 0.5

    def epsilon_at(self, round, rounds):
        return self.share * super().epsilon_at(round, rounds)


def net(inputs: int, hidden: int = 8, classes: int = 10):
    return torch.nn.Sequential(torch.nn.Linear(inputs, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, classes))


def loss(outputs, targets, smoothing: float = 0.0):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=smoothing)


class Data:
    def __init__(self, clients: int = 4):
        self.clients = clients

    def federation(self, seed):
        return Synth(priority=2, free=self.clients - 2, samples=30, test_samples=20).federation(seed)


def data(seed: int, clients: int = 4):
    return Data(clients).federation(seed)


def no_data(seed):
    return [seed]


@dataclass(frozen=True)
class Step(fa.ClientStep):
    length: float = 1.0

    def apply(self, update, context):
        return update


@dataclass(frozen=True)
class Bound(fa.ServerStep):
    length: float = 1.0

    def refuses(self, length, priority_lengths):
        return "too long" if length > self.length else None


@dataclass(frozen=True)
class Mean(fa.WeightedMean):
    length: float = 1.0


def not_a_model(inputs: int):
    return "a model"
"""
FILE = """
name = "mine"
rounds = 6
seeds = 1
arms = ["priority", "fedalign", "half"]
loss = "mine:loss"

[arm.half]
rule = "mine:Half"
share = 0.3
lr = 0.05

[data]
kind = "synth"
priority = 2
free = 2
samples = 30
test_samples = 20

[model]
kind = "mine:net"
inputs = 60

[local]
lr = 0.1
epochs = 1
"""


@pytest.fixture(autouse=True)
def _forget_users_modules(monkeypatch):
    path = list(sys.path)
    monkeypatch.setattr(user_modules, "_loaded", {})
    monkeypatch.setattr(user_modules, "_appended", set())
    yield
    sys.modules.pop("mine", None)
    sys.path[:] = path


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)
    (folder / "mine.toml").write_text(FILE)
    return folder


def run(*arguments):
    return cli.main(["run", *map(str, arguments), "--device", "cpu"])


def files(folder, name):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob(name))}


def refused(capsys, *arguments):
    assert run(*arguments) == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_rule_a_model_and_a_loss_of_ones_own_run_and_resume(project, tmp_path, capsys, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(project / "mine.toml", "--out", whole) == 0
    shown = capsys.readouterr().out
    assert "half" in shown
    assert (whole / "report.html").exists()
    config = tomllib.loads((whole / "config.toml").read_text())
    assert config["arm"]["half"] == {"rule": "mine:Half", "share": 0.3, "lr": 0.05}
    assert config["model"] == {"kind": "mine:net", "inputs": 60, "hidden": 8, "classes": 10}
    assert config["loss"] == {"kind": "mine:loss", "smoothing": 0.0}
    epsilons = {arm: RunStore(whole / arm / "seed-0").history()[5].epsilon for arm in ("fedalign", "half")}
    assert epsilons == {"fedalign": 0.2, "half": pytest.approx(0.06)}
    assert load_file(whole / "half" / "seed-0" / "model.safetensors")["0.weight"].shape == (8, 60)

    original, count = RunStore.append, []

    def append(self, record):
        count.append(1)
        if len(count) == 10:
            raise KeyboardInterrupt
        return original(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "append", append)
        assert run(project / "mine.toml", "--out", cut) == 130
    assert files(cut, "rounds.jsonl") != files(whole, "rounds.jsonl")
    assert run(project / "mine.toml", "--out", cut, "--resume") == 0
    assert files(cut, "rounds.jsonl") == files(whole, "rounds.jsonl")
    assert files(cut, "model.safetensors") == files(whole, "model.safetensors")


def test_a_built_in_with_the_same_settings_gives_the_same(project, tmp_path):
    text = (project / "mine.toml").read_text().replace('"mine:net"', '"mlp"\nhidden = [8]\nclasses = 10')
    text = text.replace('loss = "mine:loss"', "").replace('"mine:Half"', '"fedalign"')
    (project / "built-in.toml").write_text(text.replace("share = 0.3", "epsilon = 0.06"))
    assert run(project / "built-in.toml", "--out", tmp_path / "a") == 0
    assert run(project / "mine.toml", "--out", tmp_path / "b") == 0
    for arm in ("priority", "fedalign", "half"):
        one, two = (RunStore(tmp_path / out / arm / "seed-0").history() for out in "ab")
        assert [r.test_loss for r in one.rounds] == pytest.approx([r.test_loss for r in two.rounds], rel=1e-5)
        assert [r.admitted for r in one.rounds] == [r.admitted for r in two.rounds]


def test_the_command_line_names_ones_own_things_too(project, tmp_path, monkeypatch):
    monkeypatch.chdir(project)
    small = ["--rounds", "2", "--seeds", "1", "--quiet", "--set", "data.samples=20"]
    own = ["--set", "arm.half.rule=mine:Half", "--set", "arm.half.share=0.1", "--arms", "half"]
    assert run("synth-low", *small, *own, "--out", tmp_path / "a") == 0
    assert (
        run("synth-low", *small, "--set", 'arm.half="mine:Half(share=0.1)"', "--arms", "half", "--out", tmp_path / "b")
        == 0
    )
    assert files(tmp_path / "a", "rounds.jsonl") == files(tmp_path / "b", "rounds.jsonl")
    assert files(tmp_path / "a", "config.toml") == files(tmp_path / "b", "config.toml")


@pytest.mark.parametrize("data", ["mine:Data(clients=5)", "mine:data(clients=5)"])
def test_data_of_ones_own(project, data):
    experiment = load(str(project / "mine.toml"), {"data": data})
    assert experiment.settings["data"] == {"kind": data.partition("(")[0], "clients": 5}
    assert len(experiment.federation(0)) == 5
    usual = load(str(project / "mine.toml"), {"data.free": 3}).federation(0)
    assert torch.equal(experiment.federation(0).pool.x, usual.pool.x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data=mine:no_data", "data.kind is 'mine:no_data', which gave a list for seed 0, not a fedalign.Federation"),
        ("data=mine:Half", "data is 'mine:Half', which is the class Half, not data"),
        ("model=mine:not_a_model(inputs=60)", "'mine:not_a_model' made a str, not a model"),
        ("model.hiden=3", "unknown key model.hiden; did you mean 'hidden'?"),
        ("model.hidden=3.5", "model.hidden must be a whole number, not 3.5"),
        ("model.kind=mine:nett", "model.kind is 'mine:nett', but mine.py has no 'nett'; did you mean 'net'?"),
        ("loss=mine:Step", "loss is 'mine:Step', which is the class Step, not a loss"),
        ("loss=mine:los", "mine.py has no 'los'; did you mean 'loss'?"),
        ("arm.half.rule=mine:net", "unknown key arm.half.share"),
        ("arm.half.rule=mine:Data", "arm.half.rule is 'mine:Data', which is the class Data, not a rule"),
        ("arm.half.rule=theirs:Half", "there is no module 'theirs' beside the settings"),
        ("arm.half.rule=3", "arm.half.rule must be a text, not 3"),
        (
            "arm.half.cosine=0.1",
            "arm.half.cosine is an option of the rule auto, blend or fedalign-verified; mine:Half has no such option",
        ),
        ("arm.half.shares=0.1", "unknown key arm.half.shares; did you mean 'share'?"),
        ("arm.half=3", "arm.half must be a section [arm.half], not 3"),
        ("arm=3", "arm must hold sections [arm.NAME], not 3"),
        ("aggregator=meen", "aggregator is 'meen'; did you mean 'mean'?"),
        ("aggregator=mine:Step", "aggregator is 'mine:Step', which is the class Step, not an aggregator"),
        ("aggregator=mine:Mean(width=3)", "unknown key aggregator.width"),
        ("client_steps=3", "client_steps must be a list, not 3"),
        ('client_steps=["clipp"]', "client_steps[0] is 'clipp'; did you mean 'clip'?"),
        ('trackers=["tensorbord"]', "trackers[0] is 'tensorbord'; did you mean 'tensorboard'?"),
        ("local.kind=sdg", "local.kind is 'sdg'; did you mean 'sgd'?"),
        ("local=sgd(lr=0.1, epochs=1, rate=3)", "unknown key local.rate"),
        ("server=fedadam(beta=0.1)", "unknown key server.beta"),
    ],
)
def test_wrong_settings_get_one_sentence_and_nothing_is_written(project, tmp_path, capsys, change, message):
    assert message in refused(capsys, project / "mine.toml", "--out", tmp_path / "out", "--set", change)
    assert not (tmp_path / "out").exists()


def test_steps_aggregators_and_trackers_are_read_in_both_notations(project):
    steps = ["mine:Step", {"kind": "mine:Step", "length": 2}]
    change = {"client_steps": steps, "server_steps": "mine:Bound(length=3.0)", "aggregator": "mine:Mean(length=4.0)"}
    experiment = load(str(project / "mine.toml"), change)
    assert [step.length for step in experiment.client_steps] == [1.0, 2.0]
    assert [step.length for step in experiment.server_steps] == [3.0]
    assert experiment.aggregator.length == 4.0
    assert experiment.trackers == []
    written = tomllib.loads(tomli_w.dumps(experiment.settings))
    assert written["client_steps"] == [{"kind": "mine:Step", "length": 1.0}, {"kind": "mine:Step", "length": 2.0}]
    assert written["aggregator"] == {"kind": "mine:Mean", "length": 4.0}


def test_the_trimmed_mean_by_its_text(project, tmp_path):
    pytest.importorskip("fedalign.aggregation.trimmed_mean")
    chosen = ["--set", 'aggregator="trimmed-mean(trim=0.2)"']
    assert run(project / "mine.toml", "--out", tmp_path / "out", "--quiet", *chosen) == 0
    config = tomllib.loads((tmp_path / "out" / "config.toml").read_text())
    assert config["aggregator"] == {"kind": "trimmed-mean", "trim": 0.2}


def test_settings_of_version_0_1_mean_the_same(project, tmp_path):
    """A config.toml that lacks the keys that are newer resumes with their defaults."""
    text = (project / "mine.toml").read_text().replace('loss = "mine:loss"', "").replace('"mine:net"', '"logistic"')
    (project / "old.toml").write_text(text.replace("inputs = 60", "inputs = 60\nclasses = 10"))
    out = tmp_path / "out"
    assert run(project / "old.toml", "--out", out, "--quiet") == 0
    config = tomllib.loads((out / "config.toml").read_text())
    for key in ("aggregator", "client_steps", "server_steps", "trackers"):
        del config[key]
    del config["local"]["kind"]
    (out / "config.toml").write_text(tomli_w.dumps(config))
    assert run(project / "old.toml", "--out", out, "--quiet", "--resume") == 0


def test_the_experiments_settings_reach_the_rules(project):
    change = {"epsilon": 0.7, "match": "accuracy", "match_on": "train"}
    experiment = load(str(project / "mine.toml"), {**change, "arm.own.rule": "mine:Half", "arm.own.epsilon": 0.1})
    rules = {arm: experiment.rule(arm) for arm in ("half", "own", "auto", "gradient", "all", "weighted", "local")}
    assert (rules["half"].epsilon, rules["half"].on, rules["half"].match_on) == (0.7, "accuracy", "train")
    assert rules["own"].epsilon == 0.1
    assert {rules[arm].match_on for arm in ("auto", "gradient", "all", "weighted")} == {"train"}
    assert isinstance(rules["local"], fa.Alone)
    assert rules["auto"].cosine == -0.1
    assert load("synth-low", {"arm.auto.cosine": False}).rule("auto").cosine is None
    assert load("synth-low", {"arm.auto": "auto(cosine=false, ladder=[1, 0.5])"}).rule("auto").ladder == (0.5, 1.0)
    assert load("synth-low", {"local.batch_size": False}).local("all").batch_size is None


def test_a_setting_that_the_local_optimiser_lacks(project):
    (project / "mine.py").write_text(
        MINE
        + textwrap.dedent("""
        def plain(lr: float):
            return fa.LocalSGD(lr=lr, epochs=1)
        """)
    )
    with pytest.raises(fa.FedalignError, match=r"arm\.half\.mu is set, but the local optimiser 'mine:plain' has no mu"):
        load(str(project / "mine.toml"), {"local": "mine:plain(lr=0.1)", "arm.half.mu": 0.1})


def test_the_theory_knows_only_its_own_loss_and_optimiser(project):
    text = {
        "theory": True,
        "model": "logistic(inputs=60, classes=10)",
        "local.weight_decay": 0.1,
        "local.batch_size": False,
    }
    experiment = load(str(project / "mine.toml"), text)
    with pytest.raises(fa.FedalignError, match="constants are known for the built-in losses"):
        check_settings(experiment.settings, experiment.local("priority"))


def test_flowers_settings_name_the_same_things(project, monkeypatch):
    monkeypatch.syspath_prepend(str(project))
    config = {"model": "mine:net", "data": "mine:data", "trust": "report"}
    made = Settings.read({**config, "rule": "mine:Half(share=0.3)", "epsilon": 0.4, "loss": "mine:loss(smoothing=0.1)"})
    assert (made.make_rule().share, made.make_rule().epsilon) == (0.3, 0.4)
    assert made.recipe.loss.keywords == {"smoothing": 0.1}
    assert Settings.read({**config, "rule": "auto", "cosine": 0.5}).make_rule().cosine == 0.5
    assert Settings.read({**config, "rule": "gradient(threshold=0.2)"}).make_rule().threshold == 0.2
    assert Settings.read({**config, "optimizer": "sgd(steps=4)"}).make_local().steps == 4
    for change, message in (
        ({"rule": "local"}, "has no server"),
        ({"rule": "mine:Hlf"}, "did you mean 'Half'"),
        ({"rule": "fedalign(epsilom=1)"}, r"unknown key rule\.epsilom; did you mean 'epsilon'"),
        ({"loss": "cross-entropi"}, "did you mean 'cross-entropy'"),
        ({"optimizer": "sgt"}, "optimizer is 'sgt'; did you mean 'sgd'"),
        ({"optimizer": "sgd(nesterov=true)"}, r"unknown key optimizer\.nesterov"),
        ({"epochs": "5"}, "epochs must be a whole number, not '5'"),
        ({"match": "los"}, "match must be 'loss' or 'accuracy', not 'los'"),
    ):
        with pytest.raises(fa.FedalignError, match=message):
            Settings.read({**config, **change})


BROKEN = """
import torch
import fedalign as fa

class Rule(fa.Everyone):
    def select(self, offers, broadcast):
        return 1 / 0

class Tracker(fa.Callback):
    def on_round(self, record, model):
        raise OSError("no disk")

class Aggregate(fa.Aggregator):
    def combine(self, models, shares):
        return models.mean(0)[:3]

class NotANumber(fa.Aggregator):
    def combine(self, models, shares):
        return models.mean(0) * float("nan")

class Step(fa.ClientStep):
    def apply(self, update, context):
        return update.norm()

def lazy():
    return torch.nn.LazyLinear(10)
"""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("arm.own.rule=broken:Rule", "your own code failed: ZeroDivisionError: division by zero (broken.py, line 7)"),
        ('callbacks=["broken:Tracker"]', "your own code failed: OSError: no disk (broken.py, line 11)"),
        ("aggregator=broken:Aggregate", "Aggregate.combine must return (610,) of torch.float32, not (3,)"),
        ("aggregator=broken:NotANumber", "NotANumber.combine returned numbers that are not finite"),
        ('client_steps=["broken:Step"]', "Step.apply must return a tensor of (610,), not ()"),
        ("model=broken:lazy", "the model has lazy layers"),
    ],
)
def test_users_code_that_fails_is_told_in_one_sentence(tmp_path, capsys, setting, words, monkeypatch):
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    run = ["run", "synth-low", "--seeds", "1", "--rounds", "2", "--set", "warmup=0", "--out", "out", "--quiet"]
    arms = "own" if setting.startswith("arm.") else "all"
    assert cli.main([*run, "--arms", arms, "--set", setting]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "Traceback" not in told
    # Nothing had finished, so the mended command may use the same folder.
    assert cli.main([*run, "--arms", "priority"]) == 0


def test_a_folder_that_another_process_has_just_opened_is_refused(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.toml").write_text('name = "synth-low"\n')  # as in its first round
    run = ["run", "synth-low", "--arms", "priority", "--seeds", "1", "--rounds", "1", "--out", str(tmp_path / "out")]
    assert cli.main([*run, "--quiet"]) == 2
    assert "already holds a run of 'synth-low'" in capsys.readouterr().err
