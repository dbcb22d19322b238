"""Sweeps: points that are simulated together have the figures of separate runs; syntax, resume, workers, Optuna."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from test_folder_lock import refusal

from fedalign import cli
from fedalign.experiments import sweep_runs, sweep_workers
from fedalign.experiments.sweep import plan_sweep
from fedalign.experiments.sweep_space import Choice, Range, grid, label, read_axes
from fedalign.experiments.sweep_stacks import stacks

SMALL = """
rounds = 13
seeds = 2
arms = ["priority", "local", "fedalign", "wide"]
[arm.wide]
rule = "fedalign"
epsilon = 3.0
[data]
kind = "synth"
samples = 20
test_samples = 10
priority = 2
free = 3
[model]
kind = "logistic"
inputs = 60
classes = 10
[local]
lr = 0.1
epochs = 1
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def sweep(*arguments):
    return cli.main(["sweep", *map(str, arguments), "--quiet", "--device", "cpu"])


def found(folder):
    return json.loads(Path(folder, "sweep.json").read_text())


def results(folder):
    return {json.loads(line)["run"]: line for line in Path(folder, "results.jsonl").read_text().splitlines()}


def test_values_lists_tables_and_ranges_are_told_apart():
    assert read_axes(["model.hidden=[100],[200, 200]"])[1] == [Choice("model.hidden", ([100], [200, 200]))]
    assert read_axes(["model.hidden=[200, 200]"]) == ({"model.hidden": [200, 200]}, [])
    table = 'epsilon={schedule="linear", start=0.5, end=0.0},0.2'
    assert read_axes([table])[1][0].values == ({"schedule": "linear", "start": 0.5, "end": 0.0}, 0.2)
    assert read_axes(["match=loss,accuracy"])[1] == [Choice("match", ("loss", "accuracy"))]
    assert read_axes(["aggregator=median,trimmed-mean(trim=0.2)"])[1][0].values == ("median", "trimmed-mean(trim=0.2)")
    assert read_axes(['description="a, b"']) == ({"description": "a, b"}, [])
    assert read_axes(["local.epochs=1..5"])[1] == [Range("local.epochs", 1, 5, whole=True)]
    assert read_axes(["local.lr=1e-3..0.3:log"])[1] == [Range("local.lr", 0.001, 0.3, log=True)]
    assert [label(point) for point in grid(read_axes(["epsilon=0.1,inf", "trust=report,verify"])[1])] == [
        "epsilon=0.1, trust=report",
        "epsilon=0.1, trust=verify",
        "epsilon=inf, trust=report",
        "epsilon=inf, trust=verify",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a sweep varies at least one setting"),
        (["--set", "epsilon=0.1"], "a sweep varies at least one setting"),
        (["--set", "epsilon"], "--set takes KEY=VALUE,VALUE"),
        (["--set", "epsilon=0.1,,0.2"], "--set epsilon: '0.1,,0.2' has an empty value"),
        (["--set", "epsilon=0.1,0.10"], "has a value twice"),
        (["--set", "epsilon=0.1,0.2", "--set", "epsilon=0.3"], "epsilon is set twice"),
        (["--set", "model.hidden=[1,2"], "brackets or quotes that are not closed"),
        (["--set", "epsilom=0.1,0.2"], "unknown key epsilom; did you mean 'epsilon'?"),
        (["--set", "epsilon=0.1,-1"], "at epsilon=-1: "),
        (["--set", "seeds=1,2"], "seeds cannot vary in a sweep; every point has all seeds: use --seeds"),
        (["--set", "arms=all,auto"], "use --arms"),
        (["--set", "description=a, b"], "give it one value, in quotes"),
        (["--set", "local.lr=0.1..0.3"], "is a range, which needs --optuna N"),
        (["--set", "local.lr=0.3..0.1", "--optuna", "2"], "must have its lower end first"),
        (["--set", "local.lr=0..0.1:log", "--optuna", "2"], "above 0 for a logarithmic scale"),
        (["--set", "local.lr=0.1..0.3:cubic", "--optuna", "2"], "after the colon there may only be log"),
        (["--set", "local.lr=0.1..", "--optuna", "2"], "cannot read the range local.lr=0.1.."),
        (["--set", "rounds=3,4", "--rounds", "5"], "rounds is given by --rounds and varied by --set"),
        (["--set", "epsilon=0.1,0.2", "--by", "accuracy"], "--by is 'accuracy'; did you mean"),
        (["--set", "epsilon=0.1,0.2", "--for", "nobody"], "--for is 'nobody'"),
        (["--set", "epsilon=0.1,0.2", "--stack", "0"], "--stack must be at least 1"),
        (["--set", "epsilon=0.1,0.2", "--resume"], "holds no sweep to resume"),
        (["--set", "epsilon=0.1..0.2", "--optuna", "0"], "--optuna must be at least 1"),
    ],
)
def test_bad_sweeps_are_one_sentence_and_write_nothing(small, capsys, arguments, message):
    assert message in refusal(capsys, "sweep", small, *arguments)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_point_has_the_figures_of_a_run_of_its_own(small):
    assert sweep(small, "--set", "epsilon=0.1,0.4", "--set", "local.lr=0.05,0.1", "--workers", "1", "--out", "s") == 0
    whole = found("s")
    assert len(whole["points"]) == 4
    assert len(results("s")) == 2 * (2 + 2 + 4 + 2)  # seeds × (arms that ε changes or doesn't, at two rates)
    for point in whole["points"]:
        out = label(point["point"])
        given = [text for key, value in point["point"].items() for text in ("--set", f"{key}={value}")]
        assert cli.main(["run", str(small), *given, "--out", out, "--quiet", "--device", "cpu"]) == 0
        summary = json.loads(Path(out, "summary.json").read_text())["arms"]
        for arm, figures in point["arms"].items():
            for name in ("test_accuracy", "test_loss"):
                assert figures[name] == summary[arm][name], (point, arm)
    means = {
        (label(p["point"]), a): f["test_accuracy"]["mean"]
        for p in whole["points"]
        for a, f in p["arms"].items()
        if a != "local"
    }
    best = whole["best"]
    assert best["mean"] == max(means.values()) == means[label(best["point"]), best["arm"]]
    rows = list(csv.DictReader(Path("s/sweep.csv").read_text().splitlines()))
    assert len(rows) == 16
    assert {row["arm"] for row in rows if row["best"]} == {"priority", "local", "fedalign", "wide"}
    assert sum(bool(row["best"]) for row in rows) == 4


@pytest.mark.slow
def test_workers_give_the_same_results(small):
    arguments = [small, "--set", "epsilon=0.1,0.4", "--set", "data.samples=20,30"]
    assert sweep(*arguments, "--workers", "1", "--out", "one") == 0
    assert sweep(*arguments, "--workers", "2", "--stack", "5", "--out", "two") == 0
    assert results("one") == results("two")
    assert found("one") == found("two")


def test_data_and_models_may_vary(small, capsys):
    given = ["--arms", "fedalign", "--set", "data.samples=20,30", "--set", "model.classes=10,12", "--seeds", "3,"]
    assert cli.main(["sweep", str(small), *given, "--out", "s", "--device", "cpu"]) == 0
    accuracies = [point["arms"]["fedalign"]["test_accuracy"] for point in found("s")["points"]]
    assert len({one["mean"] for one in accuracies}) > 1
    assert all(one["std"] is None and len(one["per_seed"]) == 1 for one in accuracies)
    assert "best: fedalign, " in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_where_it_was(small, monkeypatch, capsys):
    arguments = [small, "--set", "epsilon=0.1,0.4", "--stack", "4", "--workers", "1"]
    assert sweep(*arguments, "--out", "whole") == 0
    original, calls = sweep_runs.simulate_stack, []

    def simulate_stack(runs, *rest):
        calls.append([run.id for run in runs])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(runs, *rest)

    monkeypatch.setattr(sweep_runs, "simulate_stack", simulate_stack)
    capsys.readouterr()
    assert sweep(*arguments, "--out", "cut") == 130
    assert "add --resume to continue" in capsys.readouterr().err
    assert results("cut").keys() == set(calls[0])
    assert sweep(*arguments, "--out", "cut", "--resume") == 0
    assert not set(calls[0]) & {id for ids in calls[2:] for id in ids}
    assert found("cut") == found("whole")
    calls.clear()
    more = [small, "--set", "epsilon=0.1,0.4,0.8", "--seeds", "3", "--workers", "1"]
    assert sweep(*more, "--out", "cut", "--resume") == 0
    lines = [json.loads(results("cut")[id]) for ids in calls for id in ids]
    new = {(line["arm"], line["seed"]) for line in lines}
    assert new == {(arm, 2) for arm in ("priority", "local", "wide", "fedalign")} | {("fedalign", 0), ("fedalign", 1)}
    assert "rounds was 13, is 14" in refusal(capsys, "sweep", *more, "--rounds", "14", "--out", "cut", "--resume")
    assert "already holds output" in refusal(capsys, "sweep", *more, "--out", "cut")
    assert "holds no run but a sweep" in refusal(capsys, "report", "cut")


def test_the_file_may_leave_a_key_to_the_sweep_and_warnings_are_said_once(small, capsys):
    text = small.read_text().replace("lr = 0.1\n", "").replace("free = 3", "free = 0")
    small.write_text(text)
    arguments = [
        small,
        "--arms",
        "priority",
        "--set",
        "local.lr=0.1,0.2",
        "--set",
        "data.samples=20,30",
        "--seeds",
        "1",
    ]
    assert sweep(*arguments, "--out", "s") == 0
    assert capsys.readouterr().err.count("all 2 clients are priority clients") == 1
    assert len(found("s")["points"]) == 4


def test_a_point_that_diverges_is_said_and_never_the_best(small, capsys):
    assert sweep(small, "--arms", "priority", "--set", "local.lr=0.1,1e38", "--out", "s") == 3
    assert sweep(small, "--arms", "fedalign", "--set", "epsilon=inf,0.1", "--seeds", "1", "--out", "t") == 0
    assert [point["point"]["epsilon"] for point in found("t")["points"]] == ["inf", 0.1]
    assert "local.lr=1e+38, priority, seed 0: training diverged" in " ".join(capsys.readouterr().err.split())
    assert found("s")["best"]["point"] == {"local.lr": 0.1}


def test_a_worker_that_is_killed_is_said(small, monkeypatch, capsys):
    class Dead:
        exitcode = -9

    class Empty:
        def get(self, timeout):
            raise sweep_workers.queue.Empty

    with pytest.raises(ValueError, match=r"ended unexpectedly \(exit code -9\)"):
        sweep_workers._next(Empty(), [Dead()])


def test_stacks_are_even_and_hold_one_model():
    plan = plan_sweep("synth-low", {"arms": ["priority", "fedalign"], "seeds": 3}, [])
    plan.add([{"model.classes": 10}, {"model.classes": 12}, {"epsilon": 0.3}])
    divided = stacks(plan.all_runs(), 4, 2)
    assert sorted(len(stack) for stack in divided) == [2, 2, 2, 3, 3, 3]
    for stack in divided:
        assert len({run.settings["model"]["classes"] for run in stack}) == 1
    assert sum(map(len, divided)) == len(plan.all_runs())


@pytest.mark.slow
def test_optuna_proposes_points_and_a_resume_repeats_none(small):
    pytest.importorskip("optuna")
    arguments = [small, "--set", "local.lr=0.01..0.3:log", "--set", "local.epochs=1..2", "--set", "epsilon=0.1,0.4"]
    arguments += ["--arms", "priority,fedalign", "--for", "fedalign", "--seeds", "1"]
    assert sweep(*arguments, "--optuna", "10", "--out", "whole") == 0
    points = [point["point"] for point in found("whole")["points"]]
    assert len(points) == 10
    assert all(0.01 <= point["local.lr"] <= 0.3 for point in points)
    assert {point["local.epochs"] for point in points} == {1, 2}
    assert {point["epsilon"] for point in points} == {0.1, 0.4}
    assert sweep(*arguments, "--optuna", "8", "--out", "parts") == 0
    first = results("parts")
    assert sweep(*arguments, "--optuna", "10", "--out", "parts", "--resume") == 0
    assert first.items() <= results("parts").items()
    assert found("parts") == found("whole")


@pytest.mark.pictures
@pytest.mark.parametrize(
    "axes",
    [
        ["epsilon=0.1,0.2,1.6"],
        ["match=loss,accuracy"],
        ["epsilon=0.1,0.4", "local.lr=0.05,1e38"],
        ["epsilon=0.1,0.4", "local.lr=0.05,0.1", "local.epochs=1,2"],
    ],
)
def test_pictures(small, axes):
    given = [text for axis in axes for text in ("--set", axis)]
    assert sweep(small, *given, "--rounds", "2", "--seeds", "2", "--workers", "1", "--out", "s") in (0, 3)
    assert Path("s/sweep.png").stat().st_size > 5000
    assert Path("s/sweep.pdf").stat().st_size > 5000
