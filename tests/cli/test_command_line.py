"""The command line: what it lists, what it refuses, and that a refusal writes nothing."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import blobs

from fedalign import cli
from fedalign.experiments.store import RunStore
from fedalign.simulation import bench
from fedalign.training import models

BASE = """
rounds = 3
seeds = 1
{top}
[data]
kind = "synth"
samples = 20
test_samples = 10
{data}
[model]
kind = "logistic"
inputs = {inputs}
classes = {classes}
[local]
lr = 0.1
epochs = 1
{local}
{rest}
"""


def write(path, top="", data="", local="", rest="", inputs=60, classes=10):
    path.write_text(BASE.format(top=top, data=data, local=local, rest=rest, inputs=inputs, classes=classes))
    return path


def refused(capsys, *arguments, writes_nothing=True):
    before = sorted(Path().rglob("*"))
    assert cli.main([str(a) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    if writes_nothing:
        assert sorted(Path().rglob("*")) == before
    message = " ".join(captured.err.split())
    assert message.startswith("fedalign: ")
    return message


def test_list(capsys):
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    for word in (
        "synth-low",
        "synth-medium",
        "synth-high",
        "trust-synth",
        "sign-flip",
        "priority",
        "all",
        "local",
        "fedalign",
        "synth",
        "nothing to download",
    ):
        assert word in out


def test_data(capsys):
    for action in ("get", "check"):
        assert cli.main(["data", action, "synth"]) == 0
        assert "nothing to download" in capsys.readouterr().out
    assert "did you mean 'synth'" in refused(capsys, "data", "get", "sinth")


@pytest.mark.pictures
def test_a_run_shows_a_table_and_says_where_its_output_is(tmp_path, capsys):
    assert cli.main(["run", str(write(tmp_path / "e.toml")), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "priority" in out
    assert "fedalign" in out
    for name in ("summary.json", "report.html", "accuracy.png", "loss.png"):
        assert f"runs/e/{name}" in out
        assert Path(f"runs/e/{name}").exists()


def test_report(tmp_path, capsys):
    for out in ("a", "b"):
        assert cli.main(["run", str(write(tmp_path / "e.toml")), "--out", out, "--quiet"]) == 0
    Path("a/report.html").unlink()
    assert cli.main(["report", "a"]) == 0
    assert Path("a/report.html").exists()
    assert cli.main(["report", "a", "b"]) == 0
    assert Path("report/2-b-accuracy.png").exists()
    assert 'id="data"' in Path("report/report.html").read_text()
    assert "report/report.html" in capsys.readouterr().out
    assert "is not a run's folder" in refused(capsys, "report", "nowhere")


def test_bench(capsys, monkeypatch):
    assert "did you mean 'logistic'" in refused(capsys, "bench", "logistik")
    assert "--repeats must be at least 1" in refused(capsys, "bench", "--repeats", "0")
    monkeypatch.setitem(bench.MODELS, "logistic", (lambda: models.logistic(20, 3), (20,), 3, 4, 60))
    assert cli.main(["bench", "logistic", "--repeats", "1"]) == 0
    assert "×" in capsys.readouterr().out


def test_unknown_experiment(capsys):
    assert "did you mean 'synth-medium'" in refused(capsys, "run", "synth-medum")
    assert "cannot read none.toml: No such file" in refused(capsys, "run", "none.toml")


@pytest.mark.parametrize(
    ("where", "text", "message"),
    [
        ("top", "roundz = 3", "unknown key roundz; did you mean 'rounds'?"),
        ("top", "epsilon = -0.1", "epsilon is -0.1 in round 0"),
        ("top", "epsilon = nan", "epsilon is nan in round 0"),
        ("top", 'epsilon = "wide"', "epsilon must be a whole number or a number or a schedule, not 'wide'"),
        ("top", 'epsilon = { schedule = "linear", start = 0.2, ende = 0 }', "did you mean 'end'?"),
        ("top", "warmup = 1.5", "warmup must be"),
        ("top", "warmup = true", "warmup must be"),
        ("top", 'match = "los"', "match must be 'loss' or 'accuracy'"),
        ("top", 'arms = ["fedaling"]', "unknown arm 'fedaling'; did you mean 'fedalign'?"),
        ("top", "arms = []", "arms must name at least one arm"),
        ("top", 'arms = "all"', "arms must be a list"),
        ("top", "model = 3", "Cannot"),
        ("data", "sample = 30", "unknown key data.sample; did you mean 'samples'?"),
        ("data", 'free = "ten"', "data.free must be a whole number, not 'ten'"),
        ("data", "priority = 0", "data.priority must be at least 1"),
        ("data", "heldout_fraction = 1.0", "heldout_fraction must be in [0, 1)"),
        ("top", 'name = "../evil"', "because it names a folder"),
        ("top", 'loss = "focal"', "loss is 'focal'; known: binary-cross-entropy, cross-entropy, squared-error"),
        ("top", 'match_on = "test"', "match_on must be 'heldout' or 'train'"),
        ("top", "epsilon = { schedule = [1], start = 1 }", "unknown schedule [1]"),
        ("top", 'epsilon = { schedule = "linear", start = "a" }', "start of schedule 'linear' must be a number"),
        ("top", 'epsilon = { schedule = "constant", value = true }', "must be a number, not True"),
        ("top", 'epsilon = { schedule = "step", start = 1, factor = 1, every = "2" }', "must be a whole number"),
        ("top", 'epsilon = { schedule = "piecewise", pieces = [[0]] }', "must be pairs"),
        ("top", 'epsilon = { schedule = "exponential", start = 1.0, decay = 1e300 }', "cannot be computed in round 2"),
        ("data", "label_noise = inf", "data.label_noise must be"),
        ("data", "alpha = inf", "data.alpha must be"),
        ("local", "learning_rate = 3", "unknown key local.learning_rate"),
        ("local", "steps = 3", "give epochs or steps"),
        ("local", "momentum = true", "local.momentum must be a number, not True"),
        ("local", "batch_size = 0", "batch_size must be"),
        ("rest", '[participation]\nkind = "uniform"\nfraction = 1.5', "fraction must be in (0, 1]"),
        ("rest", '[participation]\nkind = "uniform"\nfraction = 0.0', "fraction must be in (0, 1]"),
        ("rest", '[participation]\nkind = "uniform"', "participation.fraction is missing"),
        ("rest", '[participation]\nkind = "unifrom"', "did you mean 'uniform'?"),
        ("rest", '[participation]\nkind = "trace"\npath = "none.csv"', "cannot read trace none.csv"),
        ("rest", "[modle]\nx = 1", "unknown key modle; did you mean 'model'?"),
        ("rest", '[arm.mine]\nrule = "fedalgn"', "did you mean 'fedalign'?"),
        ("rest", "[arm.mine]\nepsilon = 1", "arm.mine.rule is missing"),
        ("rest", '[arm."../x"]\nrule = "all"', "because it names a folder"),
        ("rest", '[arm.unused]\nrule = "all"\nlr = -1', "lr is -1.0 in round 0"),
        ("rest", '[arm.unused]\nrule = "all"\nmatch_on = "test"', "arm.unused.match_on must be"),
        (
            "rest",
            "[arm.auto]\nepsilon = 0.1",
            "arm.auto.epsilon is an option of the rule fedalign; auto has no such option",
        ),
        ("rest", '[arm.mine]\nrule = "fedalign"\ncosine = 0.1', "arm.mine.cosine is an option of the rule auto"),
        ("rest", "[arm.auto]\ncosine = true", "arm.auto.cosine must be a number, not True"),
        ("rest", "[arm.auto]\ncosine = 1.5", "cosine must be from -1 to 1"),
    ],
)
def test_bad_settings(tmp_path, capsys, where, text, message):
    path = write(tmp_path / "e.toml", **{where: text})
    expected = "is not valid TOML" if message == "Cannot" else message
    assert expected in refused(capsys, "run", path)


def test_labels_outside_the_models_outputs(tmp_path, capsys):
    assert "but the model has 4 outputs" in refused(capsys, "run", write(tmp_path / "e.toml", classes=4))
    assert "does not take float32 samples of shape (60,)" in refused(
        capsys, "run", write(tmp_path / "e.toml", inputs=61)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "model.inputs=-1"], "model.inputs must be at least 1"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--rounds", "x"], "invalid int value: 'x'"),
        (["--seeds", "-1"], "seeds must be at least 1"),
        (["--set", "local.lr"], "--set takes KEY=VALUE"),
        (["--set", "local.lrr=1"], "unknown key local.lrr; did you mean 'lr'?"),
        (["--set", "local.lr=fast"], "local.lr must be a number or a schedule, not 'fast'"),
        (["--set", "local.lr=-1"], "lr is -1.0 in round 0"),
        (["--set", "rounds.x=1"], "rounds is not a section"),
        (["--arms", "priority,nobody"], "unknown arm 'nobody'"),
        (["--arms", "all,all"], "each once"),
        (["--device", "gpu"], "device"),
        (["--bogus"], "--bogus"),
        (["--resume"], "holds no run to resume"),
    ],
)
def test_bad_options(capsys, arguments, message):
    assert message in refused(capsys, "run", "synth-low", *arguments)


def test_lists_are_checked_entry_by_entry(tmp_path, capsys):
    path = write(tmp_path / "e.toml")
    text = path.read_text().replace('kind = "logistic"', 'kind = "mlp"\nhidden = [8, "a"]')
    path.write_text(text)
    assert "an entry of model.hidden must be a whole number, not 'a'" in refused(capsys, "run", path)
    path.write_text(text.replace('"a"', "0"))
    assert "model.hidden must be at least 1" in refused(capsys, "run", path)


def test_all_priority_is_said_also_quietly(tmp_path, capsys):
    assert cli.main(["run", str(write(tmp_path / "e.toml", data="free = 0")), "--quiet"]) == 0
    assert "all 10 clients are priority clients" in " ".join(capsys.readouterr().err.split())


def test_nothing_held_out_matches_on_training_data(tmp_path):
    assert cli.main(["run", str(write(tmp_path / "e.toml", data="heldout_fraction = 0.0")), "--quiet"]) == 0
    assert 'match_on = "train"' in Path("runs/e/config.toml").read_text()


def test_a_runs_config_can_be_run(tmp_path):
    assert cli.main(["run", str(write(tmp_path / "e.toml")), "--quiet", "--out", "a"]) == 0
    assert cli.main(["run", "a/config.toml", "--quiet", "--out", "b"]) == 0
    assert Path("a/fedalign/seed-0/rounds.jsonl").read_bytes() == Path("b/fedalign/seed-0/rounds.jsonl").read_bytes()
    assert Path("a/config.toml").read_text() == Path("b/config.toml").read_text()


@pytest.mark.parametrize(
    ("victim", "content", "command", "message"),
    [
        ("config.toml", b"rounds = ", ["run", "e.toml", "--out", "x"], "config.toml is damaged"),
        ("config.toml", b"\xff\xfe", ["run", "e.toml", "--out", "x", "--resume"], "config.toml is damaged"),
        ("config.toml", b"\xff\xfe", ["report", "x"], "is damaged"),
        ("summary.json", b"{", ["report", "x"], "is damaged"),
        ("all/seed-0/rounds.jsonl", b"{}\n", ["report", "x"], "rounds.jsonl, line 1 is damaged"),
        ("config.toml", None, ["run", "e.toml", "--out", "x"], "already holds a run's output"),
    ],
)
def test_damaged_folders(tmp_path, capsys, victim, content, command, message):
    write(tmp_path / "e.toml")
    assert cli.main(["run", "e.toml", "--out", "x", "--quiet"]) == 0
    capsys.readouterr()
    if content is None:
        Path("x", victim).unlink()
    else:
        Path("x", victim).write_bytes(content)
    assert message in refused(capsys, *command)


def test_a_damaged_summary_is_written_again(tmp_path):
    write(tmp_path / "e.toml")
    assert cli.main(["run", "e.toml", "--out", "x", "--quiet"]) == 0
    Path("x/summary.json").write_text("{")
    assert cli.main(["run", "e.toml", "--out", "x", "--quiet", "--resume"]) == 0
    assert json.loads(Path("x/summary.json").read_text())["rounds"] == 3


def test_a_full_disk_is_said(tmp_path, capsys, monkeypatch):
    def full(self, record):
        raise OSError(errno.ENOSPC, "No space left on device", "x/rounds.jsonl")

    monkeypatch.setattr(RunStore, "append", full)
    message = refused(capsys, "run", write(tmp_path / "e.toml"), "--quiet", writes_nothing=False)
    assert "x/rounds.jsonl: No space left on device" in message


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x, y: (x * np.nan, y), "client 'b', training data: the features of sample 0 hold NaN"),
        (lambda x, y: (x[:0], y[:0]), "client 'b', training data: there are no samples"),
        (lambda x, y: (x, y - 9), "is negative"),
    ],
)
def test_bad_folder_data(tmp_path, capsys, spoil, message):
    Path("sites").mkdir()
    x, y = blobs(20, 1, features=60)
    np.savez("sites/a.npz", x=x, y=y)
    bad_x, bad_y = spoil(x, y)
    np.savez("sites/b.npz", x=bad_x, y=bad_y)
    text = write(tmp_path / "e.toml").read_text()
    data = '[data]\nkind = "folder"\nfolder = "sites"\npriority = ["a"]\n'
    (tmp_path / "f.toml").write_text(data + "[model]" + text.split("[model]")[1])
    assert message in refused(capsys, "run", "f.toml")
    (tmp_path / "f.toml").write_text(data.replace('["a"]', "[]") + "[model]" + text.split("[model]")[1])
    np.savez("sites/b.npz", x=x, y=y)
    assert "no client is a priority client" in refused(capsys, "run", "f.toml")
    (tmp_path / "f.toml").write_text(data.replace('["a"]', "[3]") + "[model]" + text.split("[model]")[1])
    assert "an entry of data.priority must be a text, not 3" in refused(capsys, "run", "f.toml")


def test_an_output_folder_that_holds_another_run(tmp_path, capsys):
    path = write(tmp_path / "e.toml")
    assert cli.main(["run", str(path), "--out", "x", "--quiet"]) == 0
    before = {p: p.read_bytes() for p in Path("x").rglob("*") if p.is_file()}
    assert "x already holds a run of 'e'" in refused(capsys, "run", path, "--out", "x")
    assert {p: p.read_bytes() for p in Path("x").rglob("*") if p.is_file()} == before
    Path("file").write_text("")
    assert "file is a file" in refused(capsys, "run", path, "--out", "file")


def test_resume_with_changed_settings_names_them(tmp_path, capsys):
    path = write(tmp_path / "e.toml")
    assert cli.main(["run", str(path), "--out", "x", "--quiet"]) == 0
    capsys.readouterr()
    message = refused(capsys, "run", path, "--out", "x", "--resume", "--set", "local.lr=0.2", "--rounds", "4")
    assert "local.lr was 0.1, is 0.2" in message
    assert "rounds was 3, is 4" in message


def test_an_output_folder_that_cannot_be_made(tmp_path, capsys):
    path = write(tmp_path / "e.toml")
    Path("file").write_text("")
    assert "cannot write to file/x" in refused(capsys, "run", path, "--out", "file/x")


def test_exit_code_and_silence_from_a_shell(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fedalign", "run", "synth-medum"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


def test_starting_the_command_line_is_light():
    code = "import sys, fedalign.cli; print([m for m in ('matplotlib', 'pandas', 'flwr') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
