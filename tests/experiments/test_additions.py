"""A resume may add arms and seeds, seeds may be listed, and a report shows what an unfinished run has."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from conftest import interrupted_before
from test_folder_lock import refusal, run, small

from fedalign import cli
from fedalign.experiments.store import RunStore

__all__ = ["small"]


def logs(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("rounds.jsonl"))}


def changed(folder):
    return {p: p.stat().st_mtime_ns for p in Path(folder).rglob("*.safetensors")}


def test_seeds_are_a_number_or_a_list(small, capsys):
    assert run(small, "--seeds", "3,4", "--out", "a") == 0
    assert sorted(p.name for p in Path("a/fedalign").iterdir()) == ["seed-3", "seed-4"]
    assert tomllib.loads(Path("a/config.toml").read_text())["seeds"] == [3, 4]
    summary = json.loads(Path("a/summary.json").read_text())
    assert summary["seeds"] == [3, 4]
    assert len(summary["arms"]["fedalign"]["test_accuracy"]["per_seed"]) == 2
    assert run(small, "--seeds", "4,", "--out", "b") == 0
    assert logs("b")["fedalign/seed-4/rounds.jsonl"] == logs("a")["fedalign/seed-4/rounds.jsonl"]
    assert json.loads(Path("b/summary.json").read_text())["arms"]["fedalign"]["test_loss"]["std"] is None
    for text, message in (
        ("3,3", "seeds must be a number of seeds, or a list of seeds from 0 on, each once, not [3, 3]"),
        ("0", "seeds must be at least 1, not 0"),
        ("a,b", "give a number of seeds (5), or seeds (3,4; or 3, for seed 3 alone), not 'a,b'"),
    ):
        assert message in refusal(capsys, "run", small, "--seeds", text)


def test_a_resume_runs_only_the_arms_and_seeds_that_are_new(small, capsys):
    assert run(small, "--out", "whole", "--arms", "priority,fedalign,all", "--seeds", "0,1,5") == 0
    assert run(small, "--out", "out") == 0
    before = changed("out")
    assert run(small, "--out", "out", "--resume", "--arms", "all", "--seeds", "2") == 0
    assert {path: time for path, time in changed("out").items() if path in before} == before
    assert run(small, "--out", "out", "--resume", "--seeds", "5,") == 0
    settings = tomllib.loads(Path("out/config.toml").read_text())
    assert (settings["arms"], settings["seeds"]) == (["priority", "fedalign", "all"], [0, 1, 5])
    assert logs("out") == logs("whole")
    figures = [json.loads(Path(name, "summary.json").read_text())["arms"] for name in ("out", "whole")]
    assert figures[0] == figures[1]
    capsys.readouterr()
    assert run(small, "--out", "out", "--resume") == 0
    assert capsys.readouterr().err == ""


def test_an_arm_that_the_folder_lacks_is_named_and_added_only_on_demand(small, capsys):
    assert run(small, "--out", "out", "--arms", "priority") == 0
    capsys.readouterr()
    assert run(small, "--out", "out", "--resume") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said == "note: out has no fedalign; to add what is missing, name it: --arms fedalign"
    assert not Path("out/fedalign").exists()
    small.write_text(small.read_text() + '[arm.wide]\nrule = "fedalign"\nepsilon = 9.0\n')
    assert run(small, "--out", "out", "--resume", "--arms", "wide") == 0
    assert list(json.loads(Path("out/summary.json").read_text())["arms"]) == ["priority", "wide"]
    message = refusal(capsys, "run", small, "--out", "out", "--resume", "--set", "arm.wide.epsilon=1.0")
    assert "arm.wide.epsilon was 9.0, is 1.0" in message


def test_unfinished_runs_and_added_arms_go_on_together(small, monkeypatch):
    assert run(small, "--out", "whole", "--arms", "priority,fedalign,all") == 0
    with interrupted_before(monkeypatch, 2):
        assert run(small, "--out", "out") == 130
    assert run(small, "--out", "out", "--resume", "--arms", "all") == 0
    assert logs("out") == logs("whole")


def test_report_on_an_unfinished_run(small, monkeypatch, capsys):
    with interrupted_before(monkeypatch, 2):
        assert run(small, "--out", "out", "--seeds", "2") == 130
    RunStore(Path("out/fedalign/seed-1")).rewind(None)
    capsys.readouterr()
    assert cli.main(["report", "out"]) == 0
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert "unfinished: out: priority, seed 0: 2 of 4 rounds" in lines
    assert "unfinished: out: fedalign, seed 1: 0 of 4 rounds" in lines
    assert "priority" in said.out
    assert "Unfinished: fedalign, seed 1: 0 of 4 rounds" in Path("out/report.html").read_text()
    assert not Path("out/summary.json").exists()
    assert run(small, "--out", "out", "--seeds", "2", "--resume") == 0
    capsys.readouterr()
    assert cli.main(["report", "out"]) == 0
    assert capsys.readouterr().err == ""


def test_report_sees_what_a_resume_has_added_and_not_finished(small, monkeypatch, capsys):
    assert run(small, "--out", "out") == 0
    with interrupted_before(monkeypatch, 1):
        assert run(small, "--out", "out", "--resume", "--arms", "all") == 130
    capsys.readouterr()
    assert cli.main(["report", "out"]) == 0
    assert capsys.readouterr().err.splitlines() == ["unfinished: out: all, seed 0: 1 of 4 rounds"]


@pytest.mark.parametrize("seconds", [1, 2])
def test_report_without_a_round_or_without_the_last_ones(small, capsys, seconds):
    assert run(small, "--out", "out") == 0
    log = Path("out/fedalign/seed-0/rounds.jsonl")
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-seconds]))
    assert f"lacks round {4 - seconds} and all later ones" in refusal(capsys, "report", "out")
    for path in Path("out").glob("*/seed-0/*"):
        path.unlink()
    Path("out/summary.json").unlink()
    assert "an unfinished run without any round" in refusal(capsys, "report", "out")
