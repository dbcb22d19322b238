"""Early stopping, the best round, and runs that are resumed from Python."""

import dataclasses
import json
import math

import pytest
import torch
from conftest import assert_resumes_alike, federation, flat, interrupted_before, linear
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fedalign as fa
from fedalign.callbacks import RunInfo
from fedalign.cli import main
from fedalign.experiments.store import RunStore
from fedalign.simulation.spec import RunSpec

LOCAL = fa.LocalSGD(lr=0.05, epochs=1, batch_size=10)
RUN = ["run", "synth-low", "--seeds", "1", "--quiet", "--device", "cpu", "--set", "data.samples=20"]


def simulate(callbacks=(), rounds=12, rule=None, make=linear, **options):
    rule = rule or fa.Align(0.3)
    return fa.simulate(federation(), make, rule, rounds, 0, LOCAL, device="cpu", callbacks=callbacks, **options)


class StopAfter(fa.Callback):
    """Stops a run after a round."""

    needs_model = False

    def __init__(self, round: int):
        self.last, self.heard, self.now = round, [], -1

    def on_round(self, record, model):
        self.now = record.round

    def should_stop(self):
        return "enough" if self.now >= self.last else None

    def on_stop(self, stopped):
        self.heard.append(("stop", stopped))

    def on_end(self, result):
        self.heard.append(("end", result.stopped))


@pytest.mark.parametrize("rule", [fa.Align(0.3), fa.AutoAlign(), fa.Alone(), fa.Verified()])
def test_a_stopped_run_is_the_beginning_of_a_whole_one(rule):
    stop = StopAfter(4)
    result, whole = simulate([stop], rule=rule), simulate(rule=rule)
    assert result.stopped == fa.Stopped(4, "enough")
    assert stop.heard == [("stop", result.stopped), ("end", result.stopped)]
    assert result.history.rounds == whole.history.rounds[:5]
    assert whole.stopped is None
    models = result.model if isinstance(rule, fa.Alone) else [result.model]
    assert all(not part.training for model in models for part in model.modules())
    assert len(result.clients) == 5


def test_only_the_run_that_stops_stops():
    fed, stop = federation(), StopAfter(2)
    specs = [
        RunSpec(fed, fa.Align(0.3), 6, 0, LOCAL, seed=seed, callbacks=[stop] if seed == 1 else []) for seed in (0, 1, 2)
    ]
    results = fa.simulate_many(specs, linear, device="cpu")
    assert [len(result.history) for result in results] == [6, 3, 6]
    alone = fa.simulate(fed, linear, fa.Align(0.3), 6, 0, LOCAL, seed=2, device="cpu")
    assert torch.equal(flat(results[2].model), flat(alone.model))


def by_hand(values, patience, better):
    best, since = None, 0
    for round, value in enumerate(values):
        if best is None or better(value, best):
            best, since = value, 0
        else:
            since += 1
        if since == patience:
            return round
    return None


@pytest.mark.parametrize(
    ("metric", "better"), [("test_accuracy", float.__gt__), ("global_loss", float.__lt__), ("f1.free", float.__gt__)]
)
@pytest.mark.parametrize("patience", [1, 2])
def test_early_stopping_stops_where_it_should(metric, better, patience):
    options = {"metrics": ["f1"], "rounds": 30}
    whole = simulate(**options)
    expected = by_hand(whole.history.values(metric), patience, better)
    result = simulate([fa.EarlyStopping(metric, patience)], **options)
    assert (None if result.stopped is None else result.stopped.round) == expected
    assert expected is None or f"{metric} has not improved in {patience} round" in result.stopped.reason


def test_goal_start_and_min_delta():
    whole = simulate().history.values("test_accuracy")
    goal = sorted(whole)[3]
    result = simulate([fa.EarlyStopping("test_accuracy", 50, goal=goal)])
    assert result.stopped.round == next(round for round, value in enumerate(whole) if value >= goal)
    assert f"test_accuracy has reached {goal:g}" in result.stopped.reason
    assert simulate([fa.EarlyStopping("test_loss", 2, min_delta=100)]).stopped.round == 2
    assert simulate([fa.EarlyStopping("test_loss", 2, min_delta=100, start=5)]).stopped.round == 7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: fa.EarlyStopping("test_acuracy"),
            r"no figure 'test_acuracy' in a round; did you mean 'test_accuracy'",
        ),
        (lambda: fa.EarlyStopping(patience=0), "patience must be at least 1 round, not 0"),
        (lambda: fa.EarlyStopping(mode="up"), "mode must be 'auto', 'max' or 'min', not 'up'"),
        (lambda: fa.EarlyStopping("objective"), "'objective' has no value in round 0, so it cannot be watched"),
        (lambda: fa.BestRound("global_loss"), "global_loss is measured on the model that a round starts from"),
    ],
)
def test_what_cannot_be_watched_is_refused(make, message):
    with pytest.raises(fa.FedalignError, match=message):
        simulate([make()])


def test_a_model_that_diverges_has_no_metric_and_is_no_better():
    whole = simulate(metrics=["f1"], rounds=2).history
    broken = dataclasses.replace(whole.rounds[0], test_loss=math.nan, metrics={})
    info = RunInfo("arm", seed=0, rounds=2, metrics=("f1",))
    for watch in (fa.EarlyStopping("f1", 2), fa.BestRound("f1")):
        watch.check(info)
        watch.on_start(info)
        assert not isinstance(watch, fa.BestRound) or not watch.wants_model(broken)
        watch.on_round(broken, None)
        assert watch.should_stop() is None
    assert fa.History([broken, whole.rounds[1]]).values("f1")[0] is None
    with pytest.raises(fa.FedalignError, match="no figure 'f2' in a round"):
        whole.values("f2")


@pytest.mark.parametrize("rule", [fa.Align(0.3), fa.Alone()])
def test_the_best_round_is_kept_with_its_buffers(rule, tmp_path):
    make = lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))  # noqa: E731
    best, models = fa.BestRound("test_accuracy"), []

    class Keep(fa.Callback):
        def on_round(self, record, model):
            models.append(model)

    result = simulate([best, Keep()], make=make, rule=rule, out=tmp_path / "out")
    values = result.history.values("test_accuracy")
    assert (best.value, best.round) == (max(values), values.index(max(values)))
    with safe_open(tmp_path / "out" / "best.safetensors", "pt") as file:
        assert file.metadata() == {"round": str(best.round), "measure": "test_accuracy", "value": repr(best.value)}
    stored = load_file(tmp_path / "out" / "best.safetensors")
    expected = models[best.round]
    if isinstance(rule, fa.Alone):
        expected, stored = expected[2], {k.removeprefix("2."): t for k, t in stored.items() if k.startswith("2.")}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in expected.state_dict().items())
    assert not torch.equal(stored["1.running_mean"], torch.zeros(5))


def files(folder):
    """Read a run's files; the order of a safetensors file's metadata is not fixed, so its tensors count."""
    found = {name: (folder / name).read_bytes() for name in ("rounds.jsonl", "model.safetensors")}
    found |= {p.name: p.read_text() for p in folder.glob("stopped.json")}
    if (folder / "best.safetensors").exists():
        with safe_open(folder / "best.safetensors", "pt") as file:
            found |= {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118
            found["best"] = file.metadata()
    return found


@pytest.mark.parametrize("rule", [fa.Align(0.3), fa.AutoAlign()])
def test_resume_from_python(rule, tmp_path, monkeypatch):
    """An interrupted run goes on where it was, and all its files and its history are those of an undisturbed run."""

    def run(folder, **more):
        watch = [fa.EarlyStopping("test_accuracy", 3), fa.BestRound("f1")]
        return simulate(watch, rounds=40, rule=rule, metrics=["f1"], out=tmp_path / folder, **more)

    whole = run("whole")
    assert whole.stopped is not None
    with interrupted_before(monkeypatch, whole.stopped.round - 1), pytest.raises(KeyboardInterrupt):
        run("cut")
    again = run("cut", resume=True)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert again.history.rounds == whole.history.rounds
    assert again.stopped == whole.stopped
    assert torch.equal(flat(again.model), flat(whole.model))
    still = run("cut", resume=True)  # a stopped run stays as it is
    assert still.stopped == whole.stopped
    assert torch.equal(flat(still.model), flat(whole.model))
    further = run("cut", resume=True, continue_stopped=True)
    assert len(further.history) > len(whole.history)
    assert further.history.rounds[: len(whole.history)] == whole.history.rounds


def test_a_folder_is_not_used_twice_and_settings_must_agree(tmp_path):
    simulate(rounds=2, out=tmp_path / "a")
    with pytest.raises(fa.FedalignError, match="already holds a run; continue it with resume=True"):
        simulate(rounds=2, out=tmp_path / "a")
    with pytest.raises(fa.FedalignError, match=r"was run with other settings, .*: rounds was 2, is 3"):
        simulate(rounds=3, out=tmp_path / "a", resume=True)
    with pytest.raises(fa.FedalignError, match="holds no run to resume"):
        simulate(out=tmp_path / "b", resume=True)
    with pytest.raises(fa.FedalignError, match="resume needs the folder of the run to continue: out="):
        simulate(resume=True)
    with pytest.raises(fa.FedalignError, match="continue_stopped goes with resume=True"):
        simulate(out=tmp_path / "b", continue_stopped=True)
    with pytest.raises(fa.FedalignError, match="the model does not take"):
        simulate(out=tmp_path / "b", make=lambda: nn.Linear(7, 4))
    assert not (tmp_path / "b").exists()


def test_a_file_s_early_stopping_stops_single_runs_and_stays_stopped(tmp_path, capsys):
    stop = "early-stopping(metric='test_accuracy', patience=2)"
    settings = [*RUN, "--arms", "priority,all", "--rounds", "25", "--set", f'callbacks=["{stop}", "best-round"]']
    out = tmp_path / "out"
    assert main([*settings, "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())["arms"]
    lengths = {arm: len(RunStore(out / arm / "seed-0").history()) for arm in ("priority", "all")}
    assert any(length < 25 for length in lengths.values())
    for arm, length in lengths.items():
        stopped = summary[arm]["stopped"]
        assert bool(stopped) == (length < 25)
        assert not stopped or stopped["0"].startswith(
            f"stopped after round {length - 1}: test_accuracy has not improved"
        )
        assert (out / arm / "seed-0" / "model.safetensors").exists()
        assert (out / arm / "seed-0" / "best.safetensors").exists()
    before = {arm: files(out / arm / "seed-0") for arm in lengths}
    capsys.readouterr()
    assert main([*settings, "--out", str(out), "--resume"]) == 0
    assert "runs stopped early and stay so; --continue-stopped continues them" in capsys.readouterr().err
    assert {arm: files(out / arm / "seed-0") for arm in lengths} == before
    capsys.readouterr()
    settings.remove("--quiet")
    assert main([*settings, "--out", str(out), "--resume", "--continue-stopped"]) == 0
    assert "stopped after round" in " ".join(capsys.readouterr().out.split())
    for arm, length in lengths.items():
        assert length == 25 or len(RunStore(out / arm / "seed-0").history()) > length
    assert main([*settings, "--out", str(tmp_path / "b"), "--continue-stopped"]) == 2
    assert main([*settings, "--out", str(tmp_path / "b"), "--set", "callbacks=early-stopping(metric='nothing')"]) == 2
    assert not (tmp_path / "b").exists()


def test_an_interrupted_experiment_with_early_stopping_resumes_alike(tmp_path, monkeypatch):
    """Before round 9 some runs have stopped already, and others have not."""
    stop = "early-stopping(metric='test_accuracy', patience=2)"
    settings = [*RUN, "--arms", "priority,all", "--rounds", "30", "--set", "warmup=0", "--seeds", "3"]
    settings += ["--set", f'callbacks=["{stop}", "best-round"]']
    assert_resumes_alike(monkeypatch, tmp_path, settings, 9)
    whole = sorted(tmp_path.glob("whole/*/seed-*"))
    lengths = [len(RunStore(folder).history()) for folder in whole]
    assert min(lengths) < 9 < max(lengths)
    for folder in whole:
        assert files(tmp_path / "cut" / folder.relative_to(tmp_path / "whole")) == files(folder)


def test_a_run_killed_after_it_stopped_gets_its_model_on_a_resume(tmp_path):
    result = simulate([StopAfter(3)], out=tmp_path / "a")
    expected = files(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").unlink()
    again = simulate([StopAfter(3)], out=tmp_path / "a", resume=True)
    assert files(tmp_path / "a") == expected
    assert again.stopped == result.stopped


def test_a_best_round_that_was_not_kept_is_told(tmp_path):
    simulate(rounds=3, out=tmp_path / "a")
    (tmp_path / "a" / "config.toml").write_text(
        (tmp_path / "a" / "config.toml").read_text().replace("rounds = 3", "rounds = 5")
    )
    with pytest.warns(fa.FederationWarning, match=r"the best round so far \(\d\) was not kept; .* from 3 on will be"):
        simulate([best := fa.BestRound()], rounds=5, out=tmp_path / "a", resume=True)
    assert best.round in (3, 4)
