"""Experiments with personal models: settings, output files, reports and resumed runs."""

from __future__ import annotations

import io
import json
import tomllib

import pytest
import torch
from rich.console import Console

import fedalign as fa
from fedalign.cli import main
from fedalign.experiments.personal_summary import personal_summary
from fedalign.report.personal_table import personal_table

SETTINGS = """
rounds = 3
seeds = 2
arms = ["local", "all", "plain"]
[data]
kind = "synth"
priority = 2
free = 3
samples = 60
test_samples = 30
[model]
kind = "mlp"
hidden = [8]
[local]
lr = 0.1
epochs = 1
[arm.plain]
rule = "all"
personal = []
[personal]
methods = ["refine", "ditto(mu=0.5)", "local-head"]
epochs = 4
save = true
"""
OWN = '''
from fedalign.personal.method import Personalised, PersonalMethod, Train


class TwoPasses(PersonalMethod):
    """Train the served model twice."""

    def __init__(self, lr: float = 0.1) -> None:
        self.lr = lr

    def personalise(self, start):
        model = yield Train(start.served, 0, self.lr)
        model = yield Train(model, 1, self.lr)
        return Personalised(model, 2)
'''


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(SETTINGS)
    return path


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_outputs(settings, tmp_path, capsys):
    assert main(["run", str(settings), "--out", "out", "--quiet"]) == 0
    rows = read(tmp_path / "out" / "all" / "seed-0" / "clients.json")
    own = read(tmp_path / "out" / "local" / "seed-0" / "clients.json")
    for row, alone in zip(rows, own, strict=True):
        assert set(row["personal"]) == {"refine", "ditto", "local-head"}
        assert row["own_accuracy"] == alone["test_accuracy"]
        assert "personal" not in alone
    assert "personal" not in read(tmp_path / "out" / "plain" / "seed-0" / "clients.json")[0]
    summary = read(tmp_path / "out" / "summary.json")
    assert set(summary["personal"]) == {"all"}
    free = summary["personal"]["all"]["free"]
    assert list(free) == ["shared", "refine", "ditto", "local-head"]
    of_seeds = []
    for seed in (0, 1):
        lines = read(tmp_path / "out" / "all" / f"seed-{seed}" / "clients.json")
        of_seeds += [r["personal"]["refine"]["test_accuracy"] - r["own_accuracy"] for r in lines if not r["priority"]]
    assert free["refine"]["gain"] == pytest.approx(sum(of_seeds) / len(of_seeds))
    assert free["refine"]["better_off"] == sum(gain > 0 for gain in of_seeds) / 2
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "with the shared model and with personal ones" in page
    assert (tmp_path / "out" / "incentive-ditto-priority.png").is_file()
    assert main(["report", "out"]) == 0
    run = fa.ExperimentResult.read("out")["all", 1]
    models = run.personal_models("local-head")
    assert torch.equal(models["priority-0"][1].weight, run.model()[1].weight)
    with pytest.raises(fa.FedalignError, match="no models of the personal method 'fedfomo'"):
        run.personal_models("fedfomo")
    with (tmp_path / "out" / "config.toml").open("rb") as file:
        assert tomllib.load(file)["personal"]["methods"][1] == {"kind": "ditto", "epochs": 4, "patience": 5, "mu": 0.5}


def test_a_run_that_is_killed_while_clients_refine_is_resumed_to_the_same_models(settings, tmp_path, monkeypatch):
    fa.run(str(settings), "whole", report=False)
    with monkeypatch.context() as patch:
        patch.setattr("fedalign.simulation.personal_work._measured", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fa.run(str(settings), "killed", report=False)
    fa.run(str(settings), "killed", resume=True, report=False)
    for name in ("clients.json", "personal-ditto.safetensors", "rounds.jsonl"):
        whole, killed = (tmp_path / folder / "all" / "seed-1" / name for folder in ("whole", "killed"))
        assert whole.read_bytes() == killed.read_bytes(), name
    one, other = (read(tmp_path / folder / "summary.json") for folder in ("whole", "killed"))
    assert one["personal"] == other["personal"]
    with pytest.raises(fa.FedalignError, match="was run with other settings"):
        fa.run(str(settings), "killed", resume=True, report=False, personal={"methods": ["refine"]})


def test_python_gives_objects_and_a_file_of_one_s_own(settings, tmp_path):
    (tmp_path / "mine_personal.py").write_text(OWN)
    first = fa.experiment(str(settings), {"personal": {"methods": ["mine_personal:TwoPasses(lr=0.2)"]}})
    result = first.run("own", report=False)
    assert list(result.summary["personal"]["all"]["free"]) == ["shared", "TwoPasses"]
    fed = first.federation(0)
    made = fa.Experiment(fed, first.model, ["all"], rounds=2, seeds=1, personal=[fa.Ditto(mu=0.3), "refine"])
    assert made.settings["personal"]["methods"][0]["mu"] == 0.3
    found = made.run("objects", report=False).summary["personal"]["all"]["priority"]
    assert found["ditto"]["own"] is None  # there is no arm of clients that train alone
    assert found["ditto"]["clients"] == 2


def test_bad_settings_end_with_code_2(settings, capsys):
    for words, message in (
        ("personal.methods=refin", "did you mean 'refine'?"),
        ("personal.epochs=0", "epochs must be a whole number of at least 1"),
        ("arm.local.personal=refine", "the arm has no shared model"),
        ("arm.plain.personal=refin", "did you mean 'refine'?"),
    ):
        assert main(["run", str(settings), "--out", "bad", "--quiet", "--set", words]) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")


def test_list_names_the_methods(capsys):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("refine", "ditto", "fedfomo", "local-head", "scratch"))


def test_summary_counts_ties_as_neither_better_nor_worse():
    def rows(*accuracies):
        return [
            {"id": k, "priority": k == 0, "test_accuracy": 0.5, "personal": {"refine": {"test_accuracy": accuracy}}}
            for k, accuracy in enumerate(accuracies)
        ]

    alone = [{"id": k, "priority": k == 0, "test_accuracy": 0.5} for k in range(4)]
    found = personal_summary({"all": {0: rows(0.9, 0.5, 0.75, 0.25)}, "local": {0: alone}}, "local")
    assert set(found) == {"all"}
    free = found["all"]["free"]["refine"]
    assert (free["better_off"], free["worse_off"], free["clients"], free["gain"]) == (1, 1, 3, 0)
    assert found["all"]["priority"]["refine"]["gain"] == pytest.approx(0.4)
    assert found["all"]["free"]["shared"]["better_off"] == 0
    assert personal_summary({"local": {0: alone}}, "local") == {}


def test_the_table_has_room_for_its_figures_in_80_columns():
    figures = {"clients": 10.0, "accuracy": 0.875, "own": 0.75, "gain": -0.125, "better_off": 5.5, "worse_off": 4.5}
    models = dict.fromkeys(("shared", "local-head"), figures)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(personal_table({"personal": {"fedalign-accuracy": {"priority": models}}}))
    shown = console.export_text()
    assert "…" not in shown
    assert shown.count("87.5   75.0  -12.5     5.5    4.5") == 2
