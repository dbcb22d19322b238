"""The promise in a run's summary, table, page and picture."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import federation, linear

import fedalign as fa
from fedalign.experiments.summary import summarise
from fedalign.protocol.messages import Outcomes
from fedalign.protocol.promise import promise
from fedalign.protocol.records import Promise
from fedalign.report import page, promise_plots
from fedalign.report.promise_table import promise_rows, promise_sentences
from fedalign.report.read_runs import RunFolder


@pytest.fixture(scope="module")
def plain():
    return fa.simulate(federation(), linear, fa.Align(0.5), 3, device="cpu").history


def promising(history, gained, lost, samples=500):
    made, before = [], Promise()
    for r in history.rounds:
        before = promise(r.round, before, Outcomes(gained, lost, samples), (r.round + 1) * math.log(8), rounds=3)
        made.append(replace(r, promise=before))
    return fa.History(made)


def test_a_summary_has_the_last_bound_of_every_seed(plain):
    runs = {0: promising(plain, 12.0, 10.0), 1: promising(plain, 0.0, 90.0), 2: plain, 3: promising(plain, 9.0, 9.0)}
    figures = summarise({"auto": runs, "all": {0: plain}}, {"auto": {3: "diverged"}}, set())
    found = json.loads(json.dumps(figures["auto"]["promise"]))
    bounds = [runs[seed][-1].promise.worse_by for seed in (0, 1)]
    assert found["worse_by"] == {"worst": max(bounds), "per_seed": [*bounds, None, None]}
    assert found["strict"]["worst"] > found["worse_by"]["worst"]
    assert (found["gained"], found["lost"], found["samples"], found["alarms"]) == (6.0, 50.0, 500.0, 1)
    assert figures["all"]["promise"] is None


def test_rows_and_sentences(plain):
    arms = {
        "auto": {0: promising(plain, 12.0, 10.0)},
        "sure": {0: promising(plain, 400.0, 0.0)},
        "all": {0: plain},
    }
    summary = {"arms": summarise(arms, {}, set())}
    first, second = promise_rows(summary)
    assert first[:5] == ["auto", "500", "12", "10", "-0.40"]
    assert first[-1] == "0 of 1"
    assert second[0] == "sure"
    told = promise_sentences(summary)
    assert told[0].startswith("auto: with probability 95 %, the model served after the last round is at most ")
    assert "if the same samples also chose the model" in told[0]
    assert "is no less accurate than FedAvg on the priority clients" in told[1]


def test_the_page_tells_it_and_escapes_names(plain):
    name = "<b>arm</b>"
    histories = {name: {0: promising(plain, 12.0, 10.0)}}
    summary = {"arms": summarise(histories, {}, set()), "seeds": [0]}
    settings = {"name": "x", "description": "", "rounds": 3, "warmup": 0, "arms": [name]}
    run = RunFolder(Path("x"), settings, summary, histories, {})
    written = page.render_page([run])
    assert "Can the served model be worse" in written
    assert "&lt;b&gt;arm&lt;/b&gt;: with probability 95 %" in written
    assert name not in written
    del summary["arms"][name]["promise"]  # a summary of an earlier version
    assert "Can the served model be worse" not in page.render_page([run])


def test_the_picture_shows_the_largest_bounds(plain):
    runs = {0: promising(plain, 12.0, 10.0), 1: promising(plain, 10.0, 30.0)}
    figure = promise_plots.promises({"all": {0: plain}, "auto": runs}, "title")
    points, solid, dashed = figure.axes[0].lines[:3]
    assert list(points.get_xdata()) == [1, 2, 3]
    assert points.get_ydata()[0] == pytest.approx(100 * (-2 + 20) / 2 / 500)
    assert list(solid.get_ydata()) == pytest.approx([100 * r.promise.worse_by for r in runs[1].rounds])
    assert list(dashed.get_ydata()) == pytest.approx([100 * r.promise.strict for r in runs[1].rounds])
    assert promise_plots.promises({"all": {0: plain}}, "title") is None
