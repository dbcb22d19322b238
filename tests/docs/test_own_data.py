"""The guide's own-data example and the scripts of docs/models.md run as they stand on their pages, in empty folders."""

import json
import re
from pathlib import Path

import pytest

from fedalign import cli

DOCS = Path(__file__).resolve().parents[2] / "docs"


def files(page):
    """Give a page's files: code blocks whose first line names one."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return dict(re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", text, re.DOTALL))


SCRIPTS = files("models.md")


def run_script(name, text):
    exec(compile(text, name, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
def test_the_own_data_example_gives_figures_for_every_arm_and_a_report(tmp_path, capsys):
    found = files("guide.md")
    run_script("make_clients.py", found["make_clients.py"])
    Path("own.toml").write_text(found["own.toml"], encoding="utf-8")
    assert cli.main(["run", "own.toml", "--device", "cpu"]) == 0
    summary = json.loads(Path("runs/own/summary.json").read_text())
    assert list(summary["arms"]) == ["priority", "all", "local", "fedalign", "auto"]
    for arm, figures in summary["arms"].items():
        assert 0.5 < figures["test_accuracy"]["mean"] < 1, arm
    assert summary["classes"] == ["no", "yes"]
    assert "accuracy %" in capsys.readouterr().out
    assert "fedalign" in Path("runs/own/report.html").read_text()
    run_script("own.py", found["own.py"])
    assert "fedalign" in capsys.readouterr().out


def test_without_test_data_figures_are_held_out_and_say_so(capsys):
    run_script("make_clients.py", files("guide.md")["make_clients.py"])
    options = ["--set", "data.target=ill", "--set", "data.priority=site-1", "--rounds", "3", "--seeds", "1"]
    assert cli.main(["run", "clients", *options, "--out", "out", "--device", "cpu"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "held-out %" in out
    assert "There is no test data" in out
    assert "data.test_fraction = 0.2" in out
    for figures in json.loads(Path("out/summary.json").read_text())["arms"].values():
        assert figures["test_accuracy"]["mean"] is None
        assert 0.3 < figures["heldout_accuracy"]["mean"] <= 1
    assert "held-out" in Path("out/report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SCRIPTS))
@pytest.mark.filterwarnings("default::fedalign.FederationWarning")
def test_models_train(name, capsys):
    run_script(name, SCRIPTS[name])
    out = capsys.readouterr().out
    if "next-token" in out:
        assert float(out.split()[-1]) > 0.9
    if "runs/" in SCRIPTS[name]:
        (summary,) = (json.loads(path.read_text()) for path in Path("runs").glob("*/summary.json"))
        assert all(figures["test_loss"]["mean"] is not None for figures in summary["arms"].values())
        assert list(Path("runs").glob("*/report.html"))
    assert out.strip()


def test_models_are_short():
    assert {"batchnorm_dropout.py", "lstm.py", "transformer.py", "regression.py", "multi_label.py"} <= set(SCRIPTS)
    for name, text in SCRIPTS.items():
        assert len([line for line in text.splitlines() if line.strip()]) <= 15, name
