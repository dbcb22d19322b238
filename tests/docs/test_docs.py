"""What the README shows works."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import shutil
import tomllib
from pathlib import Path

import pytest

import fedalign
from fedalign import cli
from fedalign.experiments.config import load
from fedalign.experiments.summary import summarise
from fedalign.protocol.records import ClientRound, Fallback, History, Promise, RoundRecord, Tried

pytestmark = pytest.mark.pictures

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "fedalign"


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(encoding="utf-8"), re.DOTALL)


def test_readme_examples_run(capsys):
    names: dict[str, object] = {}
    for block in blocks("README.md", "python"):
        exec(block, names)
    out = capsys.readouterr().out
    assert "'trained', 'trained', 'admitted', 'admitted', 'declined', 'declined'" in out
    assert {c.decision for r in names["result"].history.rounds for c in r.clients if not c.priority} >= {"admitted"}


def test_readme_commands_parse():
    parser = cli.command_line.make_parser()
    commands = [
        line.split("#")[0].split()[1:]
        for b in blocks("README.md", "sh")
        for line in b.splitlines()
        if line.startswith("fedalign ")
    ]
    assert len(commands) >= 5
    for command in commands:
        parser.parse_args(command)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("setup", "demo", "test", "lint", "bench", "clean"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert (ROOT / ".ci" / "run").read_text().count("make test") == 1


def test_the_guides_experiment_is_valid(tmp_path):
    (block,) = (text for text in blocks("docs/guide.md", "toml") if 'name = "mine"' in text)
    exec(blocks("docs/guide.md", "python")[0], {})  # makes the clients
    (tmp_path / "mine.toml").write_text(block)
    assert len(load("mine.toml").specs()) == 12


def test_the_map_names_files_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The map")[2]
    named = set()
    for first, second in re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE):
        folders = re.findall(r"`([\w./]+)`", first) if "`" in first and "?" not in first else ["."]
        for file in re.findall(r"`([\w/]+(?:\.py|/))`", second):
            named.add((folders[0], file))
    missing = [f"{folder}/{file}" for folder, file in sorted(named) if not (PACKAGE / folder / file).exists()]
    assert len(named) > 40
    assert not missing, f"the README's map names files that don't exist: {missing}"


def test_the_page_of_output_files_lists_every_key():
    guide = (ROOT / "docs" / "outputs.md").read_text(encoding="utf-8")
    named = {
        word
        for code in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", guide, flags=re.DOTALL))
        for word in re.split(r"[^\w]", code)
    }
    for record in (RoundRecord, ClientRound, Tried, Fallback, Promise):
        assert {field.name for field in dataclasses.fields(record)} <= named
    figures = summarise({"fedalign": {0: History([])}}, {}, set())["fedalign"]
    assert {*figures, *figures["test_accuracy"]} <= named


def test_the_rules_page_has_the_readmes_rule():
    (rule,) = (
        part for block in blocks("docs/rules.md", "python") for part in block.split("\n\n\n") if "class " in part
    )
    assert rule.strip() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_rules_is_what_its_summaries_give(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = importlib.import_module("rules")
    page = shutil.copy(ROOT / "docs" / "rules.md", tmp_path)
    monkeypatch.setattr(benchmark, "PAGE", Path(page))
    benchmark.table(argparse.Namespace())
    assert Path(page).read_text(encoding="utf-8") == (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == fedalign.__version__
    assert f"version: {fedalign.__version__}" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("name", fedalign.__all__)
def test_public_names_are_documented(name):
    assert getattr(fedalign, name).__doc__


def test_the_results_page_is_what_its_summaries_give(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "docs" / "results")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["paper", "--from", "docs/results", "--page", "docs/results.md", "--quiet"]) == 0
    assert (tmp_path / "docs" / "results.md").read_text(encoding="utf-8") == page
    for number in range(1, 7):
        assert (tmp_path / "docs" / "img" / f"figure-{number}.png").is_file()
        assert (ROOT / "docs" / "img" / f"figure-{number}.png").is_file()
