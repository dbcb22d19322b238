"""Trackers that are not installed, that are unknown, and that fail in the middle of a run."""

import importlib.util
import json

import pytest
import torch
from conftest import federation, flat, linear

import fedalign as fa
from fedalign.cli import main
from fedalign.experiments.store import RunStore
from fedalign.tracking.guard import Guarded
from fedalign.tracking.tensorboard import TensorBoard

RUN = ["run", "synth-low", "--arms", "priority", "--seeds", "2", "--rounds", "4", "--quiet", "--device", "cpu"]
RUN += ["--set", "data.samples=20"]
LOCAL = fa.LocalSGD(lr=0.05, epochs=1, batch_size=10)

OWN = """
import fedalign as fa

class FailsIn(fa.Callback):
    def __init__(self, round: int = 2, start: bool = False):
        self.round, self.start = round, start
    def on_start(self, run):
        if self.start:
            raise OSError("no route to the server")
    def on_round(self, record, model):
        assert model is not None
        if record.round == self.round:
            raise ConnectionError("the server is gone")
    def on_end(self, result):
        raise SystemError("told of the end, though it had failed")
    def close(self):
        with open("closed.txt", "a") as file:
            file.write("closed ")
"""


@pytest.mark.parametrize(("name", "extra"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")])
@pytest.mark.parametrize("way", ["option", "setting"])
def test_a_tracker_that_is_not_installed(name, extra, way, tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module, *more: None if module == name else found(module, *more)
    )
    asked = ["--track", name] if way == "option" else ["--set", f'track=["{name}"]']
    assert main([*RUN, *asked, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert f"the tracker {name} needs" in told
    assert f"pip install 'fedalign[{extra}]'" in told
    assert not (tmp_path / "out").exists()


def test_an_unknown_tracker(tmp_path, capsys):
    assert main([*RUN, "--track", "tensorbord", "--out", str(tmp_path / "out")]) == 2
    assert "track[0] is 'tensorbord'; did you mean 'tensorboard'?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    assert main([*RUN, "--out", str(tmp_path / "plain")]) == 0
    capsys.readouterr()
    assert main([*RUN, "--track", "own:FailsIn, own:FailsIn(round=3)", "--out", str(tmp_path / "out")]) == 0
    told = " ".join(capsys.readouterr().err.split())
    reason = "ConnectionError: the server is gone (own.py, line 13)"
    assert (
        told.count("the tracker own:FailsIn failed in round 2 and is left out from there on, while the run goes on")
        == 1
    )
    assert told.count(reason) == 2
    assert "told of the end" not in told
    assert (tmp_path / "closed.txt").read_text() == "closed " * 4
    for seed in (0, 1):
        file = f"priority/seed-{seed}/rounds.jsonl"
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["arms"]["priority"]["diverged"] == {}


def test_a_tracker_that_cannot_start_is_an_error_before_any_round(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    assert main([*RUN, "--track", "own:FailsIn(start=true)", "--out", str(tmp_path / "out")]) == 2
    assert "the tracker own:FailsIn cannot start: OSError: no route to the server" in capsys.readouterr().err
    assert main([*RUN, "--out", str(tmp_path / "out")]) == 0  # the folder is free


def test_a_failing_tracker_in_python_warns(tmp_path):
    class Full(TensorBoard):
        def write(self, record):
            raise OSError(28, "No space left on device")

    for options in ({"track": [Full(str(tmp_path))]}, {"callbacks": [Full(str(tmp_path))]}):
        with pytest.warns(
            fa.FederationWarning, match=r"tensorboard failed in round 0 .* No space left on device"
        ) as told:
            result = fa.simulate(federation(), linear, fa.Align(0.3), 3, 0, LOCAL, device="cpu", **options)
        assert len(told) == 1
        assert len(result.history) == 3
    plain = fa.simulate(federation(), linear, fa.Align(0.3), 3, 0, LOCAL, device="cpu")
    assert torch.equal(flat(plain.model), flat(result.model))


def test_what_a_guarded_tracker_hears():
    heard = []

    class Watch(fa.Callback):
        needs_model = False

        def on_round(self, record, model):
            heard.append(record.round)

        def on_stop(self, stopped):
            heard.append(stopped.round)

    stop = fa.EarlyStopping("test_loss", 1, min_delta=100)
    fa.simulate(federation(), linear, fa.Align(0.3), 5, 0, LOCAL, device="cpu", callbacks=[stop, Guarded(Watch())])
    assert heard == [0, 1, 1]


def test_trackers_and_track_are_one_setting_and_may_change_on_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "own.py").write_text("import fedalign as fa\nclass Own(fa.Callback):\n    pass\n")
    out = tmp_path / "out"
    assert main([*RUN, "--set", 'trackers=["own:Own"]', "--track", "own:Own", "--out", str(out)]) == 0
    assert (out / "config.toml").read_text().count('kind = "own:Own"') == 2
    (out / "priority" / "seed-1" / "model.safetensors").unlink()
    assert main([*RUN, "--track", "tensorboard", "--out", str(out), "--resume"]) == 0
    assert list((out / "priority" / "seed-1" / "tensorboard").glob("events*"))
    assert len(RunStore(out / "priority" / "seed-1").history()) == 4
