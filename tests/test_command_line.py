"""The command line: what it lists, what it refuses, and that a refusal writes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedalign import cli

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
    for word in ("synth-low", "synth-medium", "synth-high", "priority", "all", "local", "fedalign", "synth", "at hand"):
        assert word in out


def test_data(capsys):
    for action in ("get", "check"):
        assert cli.main(["data", action, "synth"]) == 0
        assert "nothing to download" in capsys.readouterr().out
    assert "did you mean 'synth'" in refused(capsys, "data", "get", "sinth")


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
    assert Path("report/b-accuracy.png").exists()
    assert "<img" in Path("report/report.html").read_text()
    assert "report/report.html" in capsys.readouterr().out
    assert "is not a run's folder" in refused(capsys, "report", "nowhere")
    Path("b/summary.json").unlink()
    assert "unfinished run" in refused(capsys, "report", "b")


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
        ("data", "heldout_fraction = 0.0", "match_on='heldout' needs held-out data"),
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
        ("rest", '[arm."../x"]\nrule = "all"', "it names a folder"),
    ],
)
def test_bad_settings(tmp_path, capsys, where, text, message):
    path = write(tmp_path / "e.toml", **{where: text})
    expected = "is not valid TOML" if message == "Cannot" else message
    assert expected in refused(capsys, "run", path)


def test_labels_outside_the_models_outputs(tmp_path, capsys):
    assert "but the model has 4 outputs" in refused(capsys, "run", write(tmp_path / "e.toml", classes=4))
    assert "does not take samples of shape (60,)" in refused(capsys, "run", write(tmp_path / "e.toml", inputs=61))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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


def test_all_priority_is_said(tmp_path, capsys):
    assert cli.main(["run", str(write(tmp_path / "e.toml", data="free = 0"))]) == 0
    assert "all 10 clients are priority clients" in " ".join(capsys.readouterr().out.split())


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
        [sys.executable, "-m", "fedalign.cli", "run", "synth-medum"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


def test_starting_the_command_line_is_light():
    code = "import sys, fedalign.cli; print([m for m in ('matplotlib', 'pandas', 'flwr') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
