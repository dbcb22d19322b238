"""The HTML page: its content, and that nothing a user or a client writes is read as HTML."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from fedalign.cli import main
from fedalign.errors import FedalignError
from fedalign.report import page
from fedalign.report.read_runs import read_run
from fedalign.report.table import rows

SETTINGS = ["run", "synth-low", "--rounds", "4", "--seeds", "2", "--quiet", "--device", "cpu"]
SMALL = ["--set", "data.samples=40", "--set", "data.priority=2", "--set", "data.free=3"]
VOID = {"meta", "img"}


class Outline(HTMLParser):
    """Collects the tags of a page and checks that each one is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.alts, self.text = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.alts += [value for name, value in attributes if name == "alt"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parse(text):
    outline = Outline()
    outline.feed(text)
    outline.close()
    assert outline.open == []
    return outline


@pytest.fixture
def folder(tmp_path):
    out = tmp_path / "run"
    assert main([*SETTINGS, *SMALL, "--arms", "priority,local,fedalign,auto", "--out", str(out)]) == 0
    return out


def change(folder, **values):
    path = folder / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_page_has_its_tables_and_pictures(folder):
    outline = parse((folder / "report.html").read_text())
    assert outline.seen.count("table") == 2  # the results, and what free clients gain over local training
    assert "synth-low: test accuracy of the priority clients" in outline.alts
    assert "synth-low: ε chosen by the evaluators (auto)" in outline.alts
    text = " ".join(" ".join(outline.text).split())
    for words in ("4 rounds, seeds 0, 1, on cpu", "better off with the shared model", "config.toml"):
        assert words in text


def test_the_best_shared_model_is_marked(folder):
    summary = json.loads((folder / "summary.json").read_text())
    shared = {a: f["test_accuracy"]["mean"] for a, f in summary["arms"].items() if a != "local"}
    best = max(shared, key=shared.get)
    assert [row[0] for row in rows(summary) if row[-1]] == [best]
    assert f'<tr class="best"><td>{best}</td>' in (folder / "report.html").read_text()


def test_what_others_wrote_is_escaped(folder):
    attack = "<script>alert('client')</script>"
    path = folder / "config.toml"
    text = path.read_text()
    start = text.index("description = ")
    path.write_text(text[:start] + f'description = "{attack}"' + text[text.index("\n", start) :])
    arms = json.loads((folder / "summary.json").read_text())["arms"]
    arms["fedalign"]["diverged"] = {"0": f"client {attack}: the loss is not finite"}
    change(folder, arms=arms, device=attack, theory={"fails": attack})
    report = page.write_report([read_run(folder)], folder / "new")
    written = report.page.read_text()
    assert "<script" not in written
    assert written.count("&lt;script&gt;") == 4
    assert "script" not in parse(written).seen


def test_escaping_in_cells_names_and_alternative_texts():
    section = page._section(
        Run("<b>run</b>", {"arms": {}, "rounds": 1, "seeds": [0], "device": "cpu", "seconds": 1.0}),
        [{"title": '"><script>', "data": ""}],
    )
    section["rows"] = [{"cells": ["<script>"], "best": False}]
    outline = parse(page.render_page([section]))
    assert "script" not in outline.seen
    assert "b" not in outline.seen
    assert outline.alts == ['"><script>']


class Run:
    def __init__(self, name, summary):
        self.name, self.summary, self.settings = name, summary, {"description": name}
        self.missing = ()


def test_theory(folder):
    change(folder, theory={"fails": "Assumption 2 (strong convexity) fails"})
    written = page.write_report([read_run(folder)], folder / "fails").page.read_text()
    assert "No bound: Assumption 2 (strong convexity) fails." in written
    change(folder, theory={"arms": {"fedalign": {"fails": "no reason"}}})
    written = page.write_report([read_run(folder)], folder / "note").page.read_text()
    assert "fedalign: no bound, no reason." in written


def test_a_folder_that_cannot_be_written(folder):
    (folder / "file").touch()
    with pytest.raises(FedalignError, match="cannot write the report to"):
        page.write_report([read_run(folder)], folder / "file")


def test_several_runs_share_a_page(folder):
    report = page.write_report([read_run(folder)] * 2, folder / "both")
    assert parse(report.page.read_text()).seen.count("section") == 2
    assert len({path.name for path in report.pictures}) == len(report.pictures)
