"""What belongs together: metrics, callbacks, trackers, locks, additions and reports, in Python and as commands."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path

import pytest
import torch
from conftest import federation, linear
from test_sweep import SMALL, found, sweep
from torchmetrics.classification import MulticlassF1Score

import fedalign as fa
from fedalign import cli
from fedalign.experiments.folder_lock import FolderLock
from fedalign.experiments.store import RunStore
from fedalign.report.follow import FollowedRun
from fedalign.report.read_runs import read_run
from fedalign.report.sections import rounds_done


class Count(fa.Callback):
    """A callback whose class no file can name: it is in no module that can be imported."""

    def __init__(self, most):
        self.most, self.seen = most, 0

    def on_round(self, record, model):
        self.seen += 1

    def should_stop(self):
        return "enough" if self.seen >= self.most else None


class Watcher(fa.Callback):
    needs_model = False

    def on_round(self, record, model):
        raise RuntimeError("the tracker's disk is full")


def experiment(**settings):
    return fa.Experiment(federation(), lambda: linear(), ["priority", "all"], rounds=6, seeds=2, **settings)


def test_metrics_callbacks_and_trackers_of_an_experiment_in_python():
    def halves(outputs, targets):
        return (outputs.argmax(1) == targets).float().mean() / 2

    made = experiment(
        metrics={"f1": "f1", "half": fa.Metric(halves, on="heldout"), "theirs": MulticlassF1Score(4)},
        callbacks=[fa.EarlyStopping("f1", patience=50), "best-round(metric='f1')", Count(4)],
        track=["tensorboard", Watcher],
    )
    with pytest.warns(fa.FederationWarning, match=r"the tracker's disk is full"):
        result = fa.run(made, "out", device="cpu")
    for arm in result.arms:
        for seed in result.seeds:
            run = result[arm, seed]
            assert len(run.history) == 4  # every run has a Count of its own
            assert run.stopped == "stopped after round 3: enough"
            scores = run.history.values("f1")
            assert run.history.values("theirs") == pytest.approx(scores, abs=1e-6)
            assert run.history[-1].metrics["half"].split == "heldout"
            assert list(run.folder.glob("tensorboard/events.*"))
            best = run.best_model()
            assert isinstance(best, torch.nn.Linear)
            assert not best.training
    assert "theirs" in str(result)
    page = Path("out/report.html").read_text()
    assert "stopped early" in page
    assert "Metrics of experiment" in page
    again = fa.ExperimentResult.read("out")
    assert again.stopped == result.stopped
    assert json.loads(Path("out/summary.json").read_text())["arms"]["all"]["metrics"].keys() == {"f1", "half", "theirs"}
    resumed = fa.run(made, "out", resume=True, report=False, device="cpu")
    assert resumed.histories == result.histories
    assert any("stay so" in note for note in resumed.notes)


def test_callbacks_and_metrics_that_a_file_can_name_are_written():
    made = fa.Experiment(
        "synth(samples=20, test_samples=10)", "logistic", ["all"], rounds=3, metrics=["f1", "top-k(k=2)"],
        callbacks=[fa.EarlyStopping("f1", patience=4, goal=0.5), fa.BestRound("f1")], track="tensorboard",
    )  # fmt: skip
    read = fa.Experiment.from_toml(made.to_toml("mine.toml"))
    assert read == made
    assert read.settings["callbacks"][0]["patience"] == 4
    assert read.settings["trackers"][0]["kind"] == "tensorboard"


def test_a_metric_or_callback_that_changed_is_refused_on_a_resume():
    fa.run(experiment(metrics={"a": lambda o, t: o.sum()}, callbacks=[Count(3)]), "out", report=False, device="cpu")
    with pytest.raises(fa.FedalignError, match=r"another metrics\.a"):
        fa.run(experiment(metrics={"a": lambda o, t: o.mean()}, callbacks=[Count(3)]), "out", resume=True)
    with pytest.raises(fa.FedalignError, match="callbacks"):
        fa.run(experiment(metrics={"a": lambda o, t: o.sum()}, callbacks=[Count(4)]), "out", resume=True)


def test_a_resume_from_python_adds_arms_and_seeds_and_continues_what_stopped():
    Path("small.toml").write_text(SMALL)
    settings = {"arms": ["priority"], "seeds": 1, "callbacks": ["early-stopping(metric='test_accuracy', patience=1)"]}
    first = fa.run("small.toml", "out", report=False, device="cpu", **settings)
    settings |= {"arms": ["wide"], "seeds": [4]}
    more = fa.run("small.toml", "out", resume=True, report=False, device="cpu", **settings)
    assert (more.arms, more.seeds) == (["priority", "wide"], [0, 4])
    assert more["priority", 0].history == first["priority", 0].history
    assert first["priority", 0].stopped
    length = len(first["priority", 0].history)
    on = fa.run("small.toml", "out", resume=True, continue_stopped=True, report=False, device="cpu", **settings)
    assert len(on["priority", 0].history) > length
    with pytest.raises(fa.FedalignError, match="continue_stopped goes with resume=True"):
        fa.run("small.toml", "new", continue_stopped=True)
    assert not Path("new").exists()


def in_another_thread(work):
    caught = []

    def run():
        try:
            work()
        except fa.FedalignError as error:
            caught.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught


@pytest.mark.parametrize("resume", [False, True])
def test_folders_are_locked_from_python_too(resume):
    with FolderLock(Path("held")):
        for work in (
            lambda: fa.simulate(federation(), linear, rounds=1, out="held", resume=resume),
            lambda: fa.run(experiment(), "held", resume=resume),
        ):
            (said,) = in_another_thread(work)
            assert "held is being written by process" in said
        assert [path.name for path in Path("held").iterdir()] == [".fedalign-lock"]


def test_a_single_run_holds_its_folder_to_the_end():
    seen = []

    class Intruder(fa.Callback):
        needs_model = False

        def on_end(self, result):
            seen.extend(in_another_thread(lambda: fa.simulate(federation(), linear, rounds=2, out="one", resume=True)))

    fa.simulate(federation(), linear, rounds=2, out="one", callbacks=[Intruder(), fa.BestRound()], device="cpu")
    assert len(seen) == 1
    assert not Path("one/.fedalign-lock").exists()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in Path("one").iterdir()}
    assert modes == {stat.S_IMODE(Path("one/rounds.jsonl").stat().st_mode)}
    with pytest.raises(fa.FedalignError, match="holds a single run"):
        read_run(Path("one"))


def test_a_stopped_run_counts_as_finished_in_reports_of_unfinished_ones():
    Path("small.toml").write_text(SMALL)
    stop = ["early-stopping(metric='test_accuracy', goal=0.0)"]
    fa.run("small.toml", "out", arms=["priority", "all"], seeds=2, callbacks=stop, report=False, device="cpu")
    Path("out/summary.json").unlink()
    RunStore(Path("out/all/seed-1")).model.unlink()  # it was killed after it had stopped
    run = read_run(Path("out"))
    assert run.missing == ()
    assert run.summary["arms"]["all"]["stopped"].keys() == {"0", "1"}
    live = FollowedRun(Path("out")).read()
    assert live.summary["unfinished"]
    assert live.summary["arms"] == run.summary["arms"]
    assert rounds_done(live) == live.settings["rounds"]


def test_sweeps_stop_early_as_runs_do():
    more = """callbacks = ["early-stopping(metric='f1', patience=2)"]\nmetrics = ["f1"]\n"""
    Path("small.toml").write_text(more + SMALL)
    assert sweep("small.toml", "--set", "epsilon=0.1,0.5", "--arms", "priority,fedalign", "--out", "sweep") == 0
    arguments = ["--set", "epsilon=0.5", "--arms", "priority,fedalign", "--out", "one", "--quiet", "--device", "cpu"]
    assert cli.main(["run", "small.toml", *arguments]) == 0
    alone = json.loads(Path("one/summary.json").read_text())["arms"]
    assert any(figures["stopped"] for figures in alone.values())
    for arm, figures in found("sweep")["points"][1]["arms"].items():
        assert figures["test_accuracy"] == alone[arm]["test_accuracy"]


def test_a_report_on_a_run_under_way_does_not_take_a_new_checkpoint_for_missing_rounds(monkeypatch):
    Path("small.toml").write_text(SMALL)
    fa.run("small.toml", "out", arms=["priority"], seeds=1, rounds=4, report=False, device="cpu")
    store = RunStore(Path("out/priority/seed-0"))
    latest, previous = (store.folder / f"checkpoint{name}.safetensors" for name in ("", "-previous"))
    newest, lines = latest.read_bytes(), store.log.read_bytes().splitlines(keepends=True)
    latest.write_bytes(previous.read_bytes())
    store.log.write_bytes(b"".join(lines[:3]))
    read = RunStore.history

    def while_the_run_goes_on(self):
        found = read(self)
        store.log.write_bytes(b"".join(lines))
        latest.write_bytes(newest)
        return found

    monkeypatch.setattr(RunStore, "history", while_the_run_goes_on)
    assert len(store.whole_history()) == 3


def test_a_folder_does_not_hide_the_experiment_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "synth-low").mkdir()
    assert fa.experiment("synth-low", rounds=3).settings["data"]["kind"] == "synth"
