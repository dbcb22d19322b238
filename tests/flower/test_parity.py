"""Every rule and option of the simulation over Flower: the same decisions in every round, the same weights.

Many cases come from the registries, so that a new rule, aggregator or optimiser is tested without a change here. What
needs options has them in ``OPTIONS``.
"""

import datetime
import math
import sys
import tomllib

import in_process
import pytest
import torch
from flwr.common.config import flatten_dict, get_project_config
from in_process import history, weights
from parity import assert_same, assert_same_weights, both_ways, over_flower
from safetensors.torch import save_file

import fedalign as fa
from fedalign import registry
from fedalign.cli import main
from fedalign.experiments.config import load
from fedalign.flower.settings import Settings
from fedalign.simulation.api import simulate_many
from fedalign.training.schedules import BY_NAME

federation, keys = in_process.federation, in_process.keys

#: Options of what cannot be made without, and more of some.
OPTIONS = {
    "rule": {"gradient": "(threshold=0.1)", "choice": "(clients=2)", "weighted": "(power=2.0)"},
    "aggregator": {
        "trimmed-mean": "(trim=0.2)",
        "krum": "(f=1)",
        "multi-krum": "(f=1)",
        "nnm": "(f=1, then='median')",
        "bucketing": "(size=2)",
    },
    "client step": {"clip": "(length=0.5)"},
    "server step": {"length-bound": "(times=1.5)"},
}
SCHEDULES = {
    "constant": {"value": 0.6},
    "linear": {"start": 0.9, "end": 0.1},
    "cosine": {"start": 0.9, "end": 0.1},
    "exponential": {"start": 0.9, "decay": 0.5},
    "step": {"start": 0.9, "factor": 0.5, "every": 2},
    "piecewise": {"pieces": [[0, 0.9], [2, 0.2]]},
    "inverse-time": {"mu": 0.5, "gamma": 8.0},
}
LOCAL = "local"
SMALL = {"kind": "sgd", "lr": 0.1, "epochs": 2, "batch_size": 20}


def entries(kind, *without):
    """List the texts of all built-ins of a registry."""
    options = OPTIONS.get(kind.noun, {})
    return [f"{name}{options.get(name, '')}" for name in kind.entries if name not in without]


def decisions(rounds):
    return {c.decision for r in rounds for c in r.clients if not c.priority and not r.warmup}


@pytest.mark.parametrize("rule", [*entries(registry.RULES, "local"), "parity:Half"])
def test_rules(federation, tmp_path, rule):
    both_ways(federation, tmp_path, {"arm.own": rule}, resume=rule in ("fedalign", "auto", "fedalign-verified"))


@pytest.mark.parametrize(
    "arm",
    [
        {"rule": "auto", "ladder": [0.0, 0.3, 0.8]},
        {"rule": "auto", "fallback": False},
        {"rule": "auto", "credit": True},
        {"rule": "auto", "match": "accuracy"},
        {"rule": "auto", "cosine": 0.2},
        {"rule": "fedalign", "match": "accuracy", "epsilon": 0.2},
        {"rule": "fedalign", "match_on": "train"},
        {"rule": "fedalign", "warmup": 0.5, "lr": 0.05, "mu": 0.1},
        {"rule": "choice", "clients": 2, "trust": "verify"},
        {"rule": "fedalign-verified", "probes": 2, "cosine": 0.0},
    ],
    ids=str,
)
def test_options_of_rules(federation, tmp_path, arm):
    both_ways(federation, tmp_path, {"arm.own": arm})


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "theory"])
def test_schedules(federation, tmp_path, name):
    """A schedule of ε, and the same one of the learning rate at a tenth of its values where it has values."""
    table = {"schedule": name, **SCHEDULES[name]}
    both_ways(federation, tmp_path, {"epsilon": table, "local.lr": table}, resume=name == "linear")


@pytest.mark.parametrize(
    "change",
    [
        {LOCAL: {"kind": "sgd", "lr": 0.1, "steps": 7, "batch_size": 20}},
        {"local.batch_size": "full"},
        {LOCAL: {**SMALL, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0, "mu": 0.1}},
        {LOCAL: {**SMALL, "kind": "adam", "lr": 0.01}},
        {LOCAL: {**SMALL, "kind": "adamw", "lr": 0.01, "beta1": 0.8}},
        {"engine": "reference"},
        {"chunk": 7},
        {"free_cap": 0.2, "free_total": 0.3, "arm.own": "all"},
    ],
    ids=str,
)
def test_local_work(federation, tmp_path, change):
    both_ways(federation, tmp_path, change)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"arm.own": "all"},
        {"participation": "uniform(fraction=0.6)", "local.steps": 5, "local.epochs": None},
        {"model": "parity:batchnorm_model"},
        {"client_steps": "clip(length=0.5)"},
    ],
    ids=str,
)
def test_scaffold(federation, tmp_path, change):
    local = {**SMALL, "scaffold": True}
    if change.get("local.steps"):
        local = {"kind": "sgd", "lr": 0.1, "steps": 5, "batch_size": 20, "scaffold": True}
    change = {key: value for key, value in change.items() if not key.startswith("local.")}
    both_ways(federation, tmp_path, {LOCAL: local, **change}, resume=True)


@pytest.mark.parametrize("server", entries(registry.SERVER_OPTIMIZERS, "fedavg"))
@pytest.mark.parametrize("rule", ["fedalign", "auto"])
def test_server_optimizers(federation, tmp_path, server, rule):
    change = {"server": server, "arm.own": rule, "model": "parity:batchnorm_model"}
    both_ways(federation, tmp_path, change, resume=server == "fedadam")


@pytest.mark.parametrize(
    "participation",
    ["uniform(fraction=0.6)", "replacement(draws=2)", "bernoulli(p=0.5)", "parity:EverySecond"],
)
@pytest.mark.parametrize("rule", ["fedalign", "auto"])
def test_participation(federation, tmp_path, participation, rule):
    mine, _ = both_ways(federation, tmp_path, {"participation": participation, "arm.own": rule})
    assert not all(c.reachable for r in mine for c in r.clients) or "replacement" in participation


@pytest.mark.parametrize("repeat", [False, True])
def test_a_trace(federation, tmp_path, repeat):
    """A round without anybody is skipped; only the server has the file."""
    path = tmp_path / "trace.csv"
    path.write_text("round,client\n" + "".join(f"{t},{k}\n" for t in (0, 2) for k in range(6) if k != t))
    table = {"kind": "trace", "path": str(path), "repeat": repeat}
    mine, _ = both_ways(federation, tmp_path, {"participation": table, "arm.own": "all"})
    assert sum(r.skipped is not None for r in mine) == (1 if repeat else 2)
    path.unlink()
    config = {"model": "parity:batchnorm_model", "data": "parity:data", "participation.kind": "trace"}
    settings = Settings.read({**config, "participation.path": str(path)})  # as a node reads them
    with pytest.raises(fa.FedalignError, match="cannot read trace"):
        _ = settings.recipe.participation


@pytest.mark.parametrize("aggregator", [*entries(registry.AGGREGATORS, "mean"), "parity:MidRange"])
def test_aggregators(federation, tmp_path, aggregator):
    mine, _ = both_ways(federation, tmp_path, {"aggregator": aggregator})
    assert "admitted" in decisions(mine)


@pytest.mark.parametrize(
    "change",
    [
        *({"client_steps": [step]} for step in entries(registry.CLIENT_STEPS)),
        *({"server_steps": [step], "arm.own": "all"} for step in entries(registry.SERVER_STEPS)),
    ],
    ids=str,
)
def test_update_steps(federation, tmp_path, change):
    both_ways(federation, tmp_path, change)


@pytest.mark.parametrize("rule", ["fedalign", "auto"])
@pytest.mark.parametrize("model", ["dropout_model", "batchnorm_model", "frozen_model"])
def test_models(federation, tmp_path, model, rule):
    both_ways(federation, tmp_path, {"model": f"parity:{model}", "arm.own": rule}, resume=rule == "auto")


@pytest.mark.parametrize("rule", ["fedalign", "auto"])
@pytest.mark.parametrize("wire", [{}, {"compress": False, "cache": False}], ids=["packed", "plain"])
def test_bfloat16_weights(federation, tmp_path, rule, wire):
    """Stacked clients round differently, by a bit of bfloat16, so this engine trains one client at a time.

    Losses of samples are bfloat16, too, and those that are measured together round differently.
    """
    change = {"model": "parity:bfloat16_model", "engine": "reference", "arm.own": rule}
    if rule == "fedalign":
        change[LOCAL] = {**SMALL, "scaffold": True}  # whose corrections are plain arrays in any case
    both_ways(federation, tmp_path, change, resume=True, wire=wire, rel=2**-7)


LOSSES = [
    ({"loss": "parity:smooth_loss"}, "parity:data"),
    ({"loss": "squared-error", "data": "parity:regression", "model": "parity:one_output"}, "parity:regression_data"),
    (
        {"loss": "binary-cross-entropy", "data": "parity:two_classes", "model": "parity:one_output"},
        "parity:two_class_data",
    ),
]


@pytest.mark.parametrize(("change", "data"), LOSSES, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("rule", ["fedalign", "auto"])
def test_losses(federation, tmp_path, change, data, rule):
    both_ways(federation, tmp_path, {**change, "local.lr": 0.002, "arm.own": rule}, data)


def test_metrics(federation, tmp_path):
    mine, _ = both_ways(federation, tmp_path, {"metrics": ["f1", "recall", "auc(on='heldout')"]}, resume=True)
    assert set(mine[-1].metrics) >= {"f1", "recall.0", "auc"}


def test_metrics_of_a_regression(federation, tmp_path):
    change, data = LOSSES[1]
    both_ways(federation, tmp_path, {**change, "local.lr": 0.002, "metrics": ["mae", "r2"]}, data)


MINE = """
import fedalign as fa
from mine_helper import WIDTH
from mine_of_parity.chosen import STEP


class Half(fa.Rule):
    def offers(self, own, broadcast):
        return own.loss <= broadcast.loss + WIDTH

    def select(self, offers, broadcast):
        return fa.Selection(tuple(sorted(offers))[1::STEP])
"""
EXPERIMENT = """
rounds = 3
seeds = [2]
arms = ["priority", "half", "local"]
metrics = ["f1", "recall(on='heldout')"]
client_steps = ["clip(length=5.0)"]
data = { kind = "synth", priority = 2, free = 4, samples = 60, test_samples = 60 }
model = { kind = "mlp", hidden = [12] }
local = { lr = { schedule = "piecewise", pieces = [[0, 0.1], [2, 0.05]] }, steps = 5, batch_size = 20 }
participation = { kind = "trace", path = "trace.csv", repeat = true }
start = "start.safetensors"
arm.half = { rule = "mine_of_parity.rules:Half", warmup = 1 }
"""


def test_an_app_of_an_experiment_runs_as_its_simulation(federation, tmp_path, monkeypatch, capsys):
    """What ``fedalign flower new --from`` writes is read as Flower reads it, and run."""
    home, app = tmp_path / "home", tmp_path / "of-parity"
    home.mkdir()
    (home / "mine_of_parity").mkdir()
    (home / "mine_of_parity" / "__init__.py").write_text("")
    (home / "mine_of_parity" / "rules.py").write_text(MINE)
    (home / "mine_of_parity" / "chosen.py").write_text("STEP = 2\n")
    (home / "mine_helper.py").write_text("WIDTH = 2\n")
    (home / "trace.csv").write_text("round,client\n0,0\n0,1\n0,3\n0,5\n1,0\n1,1\n1,2\n1,4\n")
    (home / "mine.toml").write_text(EXPERIMENT)
    layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(60, 12), torch.nn.ReLU(), torch.nn.Linear(12, 10))
    save_file(layers.state_dict(), home / "start.safetensors")
    monkeypatch.chdir(home)  # the paths are relative to it
    assert main(["flower", "new", str(app), "--from", str(home / "mine.toml")]) == 2
    assert "mine has the arms priority, half, local; choose one with --arm" in capsys.readouterr().err
    assert main(["flower", "new", str(app), "--from", str(home / "mine.toml"), "--arm", "half"]) == 0
    assert "mine_helper.py" in capsys.readouterr().out
    experiment = load(str(home / "mine.toml"), {"arms": ["half"], "device": "cpu"})
    ((_, _, spec),) = experiment.specs()
    (expected,) = simulate_many([spec], experiment.model, device="cpu", **experiment.engine_options())
    for name in ("mine_of_parity", "mine_of_parity.rules", "mine_of_parity.chosen", "mine_helper"):
        monkeypatch.delitem(sys.modules, name)  # those of the app are meant
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(app), *(path for path in sys.path if path != str(home))])
    config = flatten_dict(get_project_config(app)["tool"]["flwr"]["app"]["config"])
    config |= {"roster": str(tmp_path / "roster.toml"), "device": "cpu", "wait": 0.0, "timeout": 0.3}
    over_flower(federation, tmp_path, config)
    assert_same(history(tmp_path), expected.history.rounds)
    assert_same_weights(weights(tmp_path), expected.model)


@pytest.mark.parametrize(
    ("line", "name", "said"),
    [
        ("personal = ['refine', 'fedfomo']", "app", "the personal method fedfomo sends clients' models to other"),
        ("arm.auto = { rule = 'auto', personal = ['fedfomo'] }", "app", "the personal method fedfomo sends clients'"),
        ("", "mine-alone", "the app would have the name of your module 'mine_alone'; choose another folder"),
    ],
)
def test_an_app_that_could_not_run_is_not_made(tmp_path, monkeypatch, capsys, line, name, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_alone.py").write_text("def loss(outputs, targets):\n    return (outputs.sum(1) - targets) ** 2\n")
    (tmp_path / "mine.toml").write_text(
        f"arms = ['auto']\nloss = 'mine_alone:loss'\nmodel = 'logistic'\n{line}\n"
        "data = { kind = 'synth', priority = 1, free = 1 }\nlocal = { lr = 0.1, epochs = 1 }\n"
    )
    assert main(["flower", "new", name, "--from", "mine.toml"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("line", "believes", "bounded"),
    [
        ("", True, False),
        ("server_steps = ['length-bound(times=3)']", True, True),
        ("trust = 'verify'", False, True),
        ("arm.auto = { rule = 'auto', trust = 'verify' }", False, True),
        ("trust = 'verify'\narm.auto = { rule = 'auto', trust = 'report' }", True, False),
    ],
)
def test_a_new_app_that_believes_free_clients_says_so(tmp_path, monkeypatch, capsys, line, believes, bounded):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        f"arms = ['auto']\nmodel = 'logistic'\n{line}\n"
        "data = { kind = 'synth', priority = 1, free = 1 }\nlocal = { lr = 0.1, epochs = 1 }\n"
    )
    assert main(["flower", "new", "app", "--from", "mine.toml"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("believes what free clients report" in said) == believes
    assert ("no bound on the length of their updates, so none is in force; consider longest = 10.0" in said) != bounded


def test_an_app_has_the_paths_and_values_of_its_experiment(tmp_path, monkeypatch):
    """Names of places in the template, relative paths, infinities and dates all arrive as they are."""
    home = tmp_path / "home"
    (home / "data" / "SEED-IV").mkdir(parents=True)
    for name in ("SEED-IV", "APP_PACKAGE"):
        (home / name).mkdir()
    (home / "own_source.py").write_text(
        "import fedalign as fa\nfrom fedalign.data.synth import Synth\n\n\nclass Own(Synth):\n"
        "    def __init__(self, folder, scale, when, priority=1, free=1):\n"
        "        super().__init__(priority=priority, free=free)\n"
    )
    (home / "mine.toml").write_text(
        "arms = ['auto']\nmodel = 'logistic'\nseeds = [7]\nledger = { key = 'server.key' }\n"
        "data = { kind = 'own_source:Own', folder = 'SEED-IV', scale = inf, when = 2026-01-02 }\n"
        "local = { lr = 0.1, epochs = 1 }\n"
    )
    monkeypatch.chdir(home)
    assert main(["flower", "new", str(tmp_path / "app"), "--from", "mine.toml"]) == 0
    made = {}
    text = (tmp_path / "app" / "app" / "task.py").read_text()
    exec(text, made)
    assert made["EXPERIMENT"]["folder"] == str(home / "SEED-IV")
    assert made["EXPERIMENT"]["scale"] == math.inf
    assert made["EXPERIMENT"]["when"] == datetime.date(2026, 1, 2)
    assert "seed=7" in text
    config = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config["ledger"]["key"] == str(home / "server.key")
