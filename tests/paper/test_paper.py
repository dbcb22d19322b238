"""The paper's figures: running them, the page, and verdicts on made-up results."""

import json
import shutil

import pytest
from conftest import interrupted_before

from fedalign.cli import main
from fedalign.errors import FedalignError
from fedalign.paper.compact import compact, data_name, read_all, rounds_to_reach
from fedalign.paper.figures import FIGURES
from fedalign.paper.readings import READINGS
from fedalign.paper.runs import jobs
from fedalign.paper.verdicts import judge
from fedalign.protocol.records import History, RoundRecord
from fedalign.report.read_runs import read_run

pytestmark = pytest.mark.pictures


def run(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def figure_two(tmp_path_factory):
    out = tmp_path_factory.mktemp("paper")
    assert run("paper", "--figures", "2", "--rounds", 4, "--seeds", 2, "--quiet", "--out", out) == 0
    return out


def test_a_figure_from_runs(figure_two, capsys):
    page = (figure_two / "results.md").read_text()
    assert "| 2 | FedALIGN consistently outperforms the baselines at every noise level: `synth-low`, Synth |" in page
    assert "`fedalign run synth-low --arms priority,all,fedalign --rounds 4 --seeds 2`" in page
    assert "not run yet" in page  # the other figures
    assert (figure_two / "img" / "figure-2.png").stat().st_size > 20_000
    # What is done is not done again, and the page is the same from the summaries alone.
    before = (figure_two / "synth-low" / "summary.json").stat().st_mtime_ns
    assert run("paper", "--figures", "2", "--rounds", 4, "--seeds", 2, "--out", figure_two) == 0
    assert "finished before" in capsys.readouterr().out
    assert (figure_two / "synth-low" / "summary.json").stat().st_mtime_ns == before
    assert run("paper", "--from", figure_two / "summaries", "--page", figure_two / "again.md", "--quiet") == 0
    assert (figure_two / "again.md").read_text() == page.replace("results.md", "again.md")


def test_a_figure_goes_on_where_it_was_broken_off(figure_two, tmp_path, monkeypatch):
    command = ("paper", "--figures", "2", "--rounds", 4, "--seeds", 2, "--quiet", "--out", tmp_path)
    with interrupted_before(monkeypatch, round=2):
        assert run(*command) == 130
    assert run(*command) == 0
    for name in FIGURES[2].experiments:
        mine, whole = (json.loads((d / "summaries" / f"{name}.json").read_text()) for d in (tmp_path, figure_two))
        assert mine["arms"] == whole["arms"]


def test_compact_summaries(figure_two):
    results = compact(read_run(figure_two / "synth-low"))
    assert results["data"] == "Synth"
    assert len(results["arms"]["all"]["curves"]["test_accuracy"]["mean"]) == 4
    assert read_all(figure_two / "summaries")["synth-low"] == results


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--figures", "9"], "the paper has no figure 9"),
        (["--figures", "one"], "--figures takes numbers"),
        (["--from", "nowhere"], "there is no folder nowhere"),
        (["--figures", "1"], "fedalign data get fmnist"),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FEDALIGN_DATA", str(tmp_path / "none"))
    assert run("paper", *arguments, "--out", tmp_path / "out") == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_summaries_that_are_not(tmp_path):
    with pytest.raises(FedalignError, match="holds no summaries"):
        read_all(tmp_path)
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(FedalignError, match="is not a summary"):
        read_all(tmp_path)


def test_emnist_can_be_other_files(tmp_path):
    found = {job.experiment.name: job.experiment.settings["data"] for job in jobs([1, 6], tmp_path, {}, "redrawn")}
    assert found["emnist"]["folder"] == "redrawn"
    assert "folder" not in found["fmnist"]
    assert data_name({"kind": "emnist", "folder": "/x/emnist47-redrawn"}) == "EMNIST-47 (redrawn)"
    assert data_name({"kind": "emnist", "folder": "/x/mine"}) == "emnist files of mine"


def results(incentive=None, **arms):
    def one(per_seed):
        mean = sum(per_seed) / len(per_seed)
        return {
            "test_accuracy": {"mean": mean, "std": 0.0, "per_seed": per_seed},
            "rounds_to_priority": [10, None, None, None, None],
        }

    return {
        "seeds": [0, 1, 2, 3, 4],
        "arms": {arm: one(per_seed) for arm, per_seed in arms.items()},
        "incentive": incentive or {},
    }


@pytest.mark.parametrize(
    ("fedalign", "verdict"),
    [
        ([0.8] * 5, "reproduced"),
        ([0.705] * 5, "not reproduced: less than a point above `priority`"),
        ([0.5] * 5, "not reproduced: not above `priority`, not above `all`"),
        ([0.9, 0.9, 0.9, 0.69, 0.69], "depends on the seed: above `priority` in 3 of 5 seeds"),
        ([0.8, 0.8, 0.8, 0.8, 0.69], "reproduced"),
    ],
)
def test_verdicts(fedalign, verdict):
    found = judge("above both", results(fedalign=fedalign, priority=[0.7] * 5, all=[0.6] * 5))
    assert found.verdict == verdict
    assert "rounds to `priority`: `fedalign` 10 (1/5)" in found.measured


def test_other_verdicts():
    below = results(priority=[0.7] * 5, all=[0.6] * 5)
    assert judge("all below", below).verdict == "reproduced"
    equal = results(priority=[0.7] * 5, all=[0.7] * 5)
    assert judge("all below", equal).verdict == "not reproduced: not above `all`"
    rounds = results(fedalign=[0.7] * 5, priority=[0.7] * 5)
    for mine, verdict in (
        ([10, 20, 30, 40, None], "reproduced"),
        ([10, 20, 30, None, None], "depends on the seed: sooner in 3 of 5 seeds"),
        ([60, 60, 30, None, None], "not reproduced: sooner in 1 of 5 seeds"),
    ):
        rounds["arms"]["fedalign"]["rounds_to_priority"] = mine
        rounds["arms"]["priority"]["rounds_to_priority"] = [50] * 5
        assert judge("faster", rounds).verdict == verdict
    gain = {"fedalign": {"shared": 0.8, "own": 0.7, "better_off": 40, "free": 58}}
    assert judge("better off", results(gain)).verdict == "reproduced"
    gain["fedalign"]["better_off"] = 20
    assert judge("better off", results(gain)).verdict == "not reproduced"
    assert judge("better off", results()).verdict == "not measured"


def test_rounds_to_reach():
    def record(r, accuracy):
        return RoundRecord(r, None, None, None, accuracy, None, None, False, None, 0, 0, ())

    climbing = History([record(r, r / 10) for r in range(10)])
    assert rounds_to_reach(climbing, 0.5) == 8  # the mean of rounds 3 to 7 is 0.5
    assert rounds_to_reach(climbing, 0.95) is None
    assert rounds_to_reach(climbing, None) is None


def test_the_page_judges_figure_three_with_refinement(figure_two, tmp_path):
    folder = tmp_path / "summaries"
    shutil.copytree(figure_two / "summaries", folder)
    (folder / "personal").mkdir()
    shared = {"arm": "all", "model": "shared", "accuracy": 50.0, "alone": 60.0, "better_off": 0.2, "worse_off": 0.8}
    shared |= {"gain": -10.0, "gain_by_seed": [-10.0], "better_off_than_scratch": 0.1, "gain_over_scratch": -9.0}
    refined = {**shared, "model": "refine", "better_off": 0.9, "gain": 3.0, "gain_over_scratch": 1.5}
    run = {"experiment": "made-up", "data": "Synth", "command": "none", "rounds": 5, "seeds": [0], "clients": 10}
    path = folder / "personal" / "made-up.json"
    path.write_text(json.dumps({**run, "device": "cpu", "rows": [shared, refined]}))
    assert main(["paper", "--from", str(folder), "--page", str(tmp_path / "page.md"), "--quiet"]) == 0
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "- `all`: the claim holds with refinement in 1 of 1 experiments (`made-up`)." in page
    assert "| `made-up` | `all` | 20% | -10.0 | 90% | +3.0 | +1.50 | **holds** |" in page
    path.write_text("{}")
    assert main(["paper", "--from", str(folder), "--page", str(tmp_path / "page.md"), "--quiet"]) == 2


def test_the_page_judges_other_readings(figure_two, tmp_path):
    """The base has matched on losses; a reading that changes no setting adds arms, another one stands by itself."""
    folder = tmp_path / "summaries"
    shutil.copytree(figure_two / "summaries", folder)
    (folder / "readings").mkdir()
    base = json.loads((folder / "synth-low.json").read_text())
    arms = {arm: {k: v for k, v in figures.items() if k != "curves"} for arm, figures in base["arms"].items()}
    better = {**arms["priority"], "test_accuracy": {"mean": 0.99, "std": 0.0, "per_seed": [0.99, 0.99]}}
    run = {**base, "command": "the command"}
    for reading, own in {
        "accuracy": {"fedalign-accuracy": better},
        "full-batches": {**arms, "fedalign-accuracy": better},
    }.items():
        path = folder / "readings" / f"synth-low.{reading}.json"
        path.write_text(json.dumps({**run, "reading": reading, "arms": own}))
    assert main(["paper", "--from", str(folder), "--page", str(tmp_path / "page.md"), "--quiet"]) == 0
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    short = next(line for line in page.splitlines() if "`synth-low` | As in the figures: `fedalign-accuracy`" in line)
    assert short.endswith("; Full batches: `fedalign-accuracy` | 2 of 4 |")
    assert all(f"### {reading.title}" in page for reading in READINGS.values())
    assert page.count("Not measured yet.") == 2
    path.write_text(json.dumps({**run, "reading": "mine", "arms": arms}))
    assert main(["paper", "--from", str(folder), "--page", str(tmp_path / "page.md"), "--quiet"]) == 2
