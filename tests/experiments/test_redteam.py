"""The red team: its runs, what aggregators are told, its output, interruption and resuming."""

import csv
import itertools
import json
import re
from dataclasses import replace

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

import fedalign as fa
from fedalign import cli
from fedalign.attacks.catalogue import CATALOGUE, named_attacks
from fedalign.experiments import redteam_runs
from fedalign.experiments.config import load
from fedalign.experiments.redteam import Case, plan_redteam, split_names
from fedalign.experiments.redteam_runs import Figures, stacks
from fedalign.experiments.redteam_table import table_of, worst_cases
from fedalign.report.redteam_plot import heat_map, signed, tint

pytestmark = pytest.mark.slow

SMALL = ["redteam", "trust-synth", "--rounds", "3", "--seeds", "2", "--fractions", "0.25,0.75", "--device", "cpu"]
FEW = ["--rules", "all,all+trimmed-mean", "--attacks", "sign-flip,backdoor(target=1)"]


def team(**options):
    options = {"rules": ["all", "auto"], "attacks": ["zero", "strike-sign-flip"], "fractions": [0.5, 0.25], **options}
    return plan_redteam("trust-synth", {"seeds": 2, "rounds": 20}, **options)


def test_its_runs():
    small = team()
    cases = small.cases()
    assert len(cases) == len(set(cases)) == 2 * (3 + 2 * 2 * 2)
    assert {case.rule for case in cases if case.attack != "none"} == {"all", "auto"}
    assert small.fractions == (0.25, 0.5)
    spec = small.spec(Case("zero", 0.5, 1, "auto"))
    assert (spec.seed, spec.name, spec.adversary.fraction) == (1, "auto", 0.5)
    assert small.spec(Case("zero", 0.5, 0, "all")).adversary is spec.adversary
    assert small.spec(Case("none", 0.0, 0, "all")).adversary is None
    assert (small.window("zero"), small.window("strike-sign-flip"), small.window("none")) == (10, 3, 10)


def test_the_baseline_measures_backdoors_once():
    cases = team(attacks=["backdoor"]).cases()
    assert [case.fraction for case in cases if (case.rule, case.attack) == ("priority", "backdoor")] == [0.25, 0.25]


def test_aggregators_are_told_the_true_number_unless_one_is_given():
    rules = ["all+trimmed-mean", "all+krum", "all+nnm(then='median')", "all+median", "all+trimmed-mean(trim=0.3)"]
    small = team(rules=rules)
    made = {rule: [small.spec(Case("zero", part, 0, rule)).aggregator for part in (0.25, 0.5)] for rule in rules}
    honest = small.spec(Case("none", 0.0, 0, "all+krum")).aggregator
    assert made["all+trimmed-mean"] == [fa.TrimmedMean(4), fa.TrimmedMean(8)]
    assert [honest, *made["all+krum"]] == [fa.Krum(0), fa.Krum(4), fa.Krum(8)]
    assert [one.f for one in made["all+nnm(then='median')"]] == [4, 8]
    assert all(isinstance(one, fa.CoordinateMedian) for one in made["all+median"])
    assert made["all+trimmed-mean(trim=0.3)"] == [fa.TrimmedMean(0.3)] * 2


def test_rules_with_options_and_arms_of_the_file(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'rounds = 5\n[data]\nkind = "synth"\npriority = 2\nfree = 4\n'
        '[model]\nkind = "logistic"\ninputs = 60\nclasses = 10\n'
        '[local]\nlr = 0.1\nepochs = 1\n[arm.wide]\nrule = "fedalign"\nepsilon = 3.0\n'
    )
    small = plan_redteam(str(tmp_path / "mine.toml"), {}, ["wide", "fedalign(epsilon=0.7)"], ["zero"], [0.5])
    assert [small.spec(Case("zero", 0.5, 0, rule)).rule.epsilon for rule in small.rules] == [3.0, 0.7]


def test_the_catalogue():
    found = named_attacks(CATALOGUE)
    assert list(found) == list(CATALOGUE)
    assert all("fraction" not in table for table in found.values())
    assert split_names("a, b(c=[1, 2], d=3),,e") == ["a", "b(c=[1, 2], d=3)", "e"]
    assert split_names("all+krum(f=1e+3)", "+") == ["all", "krum(f=1e+3)"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rules", "al"], "rule is 'al'; did you mean 'all'?"),
        (["--rules", "all+medain"], "aggregator is 'medain'; did you mean 'median'?"),
        (["--rules", "all+median+krum"], "has 2 aggregators; give at most one"),
        (["--rules", "all,all"], "the rule 'all' is named twice"),
        (["--rules", ","], "--rules names no rule"),
        (["--rules", "priority"], "--rules names no rule to compare with priority"),
        (["--attacks", ""], "--attacks names no attack"),
        (["--attacks", "zero,backdoor(target=99)"], "target is 99, but there are 10 classes"),
        (["--attacks", "zero,backdoor(column=60)"], "does not fit into samples of shape (60,)"),
        (["--attacks", "sleeper", "--rounds", "1"], "nobody attacks"),
        (["--set", "callbacks=early-stopping"], "sets callbacks, which a red team does not have"),
        (["--set", "track=tensorboard"], "sets trackers, which a red team does not have"),
        (["--rules", "local"], "the arm 'local' has no shared model"),
        (["--attacks", "label-flp"], "unknown attack 'label-flp'; did you mean 'label-flip'"),
        (["--attacks", "zero,zero"], "the attack 'zero' is named twice"),
        (["--attacks", "sign-flip(scal=3)"], "unknown key adversary.scal; did you mean 'scale'?"),
        (["--attacks", "mine:Evil"], "mine:Evil"),
        (["--attacks", "evil.toml"], "cannot read evil.toml"),
        (["--fractions", "0.5,half"], "--fractions takes numbers such as 0.25,0.5, not 'half'"),
        (["--fractions", "0,0.5"], "--fractions takes parts of the free clients, above 0 and at most 1"),
        (["--stack", "0"], "--stack must be at least 1, not 0"),
        (["--set", "adversary.kind=zero"], "a red team brings its own attacks"),
        (["--resume"], "holds no red team to resume"),
        (["--seeds", "0"], "seeds must be at least 1, not 0"),
    ],
)
def test_refusals_write_nothing(tmp_path, capsys, options, message):
    assert cli.main(["redteam", "trust-synth", "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_attack_file_may_not_be_called_none(tmp_path):
    (tmp_path / "none.toml").write_text('[adversary]\nkind = "sign-flip"\n')
    with pytest.raises(fa.FedalignError, match="cannot be named 'none', which stands for no attack"):
        named_attacks([str(tmp_path / "none.toml")])


def test_only_what_it_shows_is_measured():
    planned = plan_redteam("trust-synth", {"seeds": 1, "ledger.method": "leave-one-out", "personal": ["refine"]})
    assert load("trust-synth", {"ledger.method": "leave-one-out"}).specs()[0][2].ledger is not None
    assert all((spec.ledger, spec.personal, spec.metrics) == (None, {}, {}) for spec in planned.specs.values())


def test_an_experiment_without_classes_is_refused(capsys):
    assert cli.main(["redteam", "theory-quadratic", "--out", "out"]) == 2
    assert "a red team compares test accuracies" in capsys.readouterr().err


def test_an_attack_from_a_file_and_of_the_users_own(tmp_path):
    (tmp_path / "evil.toml").write_text('[adversary]\nkind = "sign-flip"\nscale = 4.0\nreport = "truthful"\n')
    (tmp_path / "mine.py").write_text(
        "import fedalign as fa\n\n\nclass Evil(fa.Attack):\n    changes_updates = True\n\n"
        "    def send(self, updates, scene):\n        return {k: -update for k, update in updates.own.items()}\n"
    )
    assert cli.main([*SMALL, "--rules", "all", "--attacks", "evil.toml,mine:Evil", "--out", "out", "--quiet"]) == 0
    rows = json.loads((tmp_path / "out" / "redteam.json").read_text())["results"]
    assert {row["attack"] for row in rows} == {"none", "evil", "mine:Evil"}
    (tmp_path / "evil.toml").write_text('[adversary]\nkind = "sign-flip"\nfraction = 0.5\n')
    assert cli.main([*SMALL, "--attacks", "evil.toml", "--out", "out2"]) == 2


@pytest.mark.pictures
def test_its_output(tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main([*SMALL, *FEW, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "all+trimmed-mean" in shown
    assert "success of backdoors" in shown
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert len(results) == 2 * (3 + 2 * 2 * 2 + 1)
    found = json.loads((out / "redteam.json").read_text())
    by_hand = {(r["rule"], r["attack"], r["fraction"], r["seed"]): r["test_accuracy"] for r in results}
    gains = [
        100 * (by_hand["all", "sign-flip", 0.75, seed] - by_hand["priority", "none", 0.0, seed]) for seed in (0, 1)
    ]
    (row,) = (r for r in found["results"] if (r["rule"], r["attack"], r["fraction"]) == ("all", "sign-flip", 0.75))
    assert row["gain"] == pytest.approx(sum(gains) / 2)
    assert row["worst_seed"] == pytest.approx(min(gains))
    (worst,) = (w for w in found["worst"] if (w["rule"], w["fraction"]) == ("all", 0.75))
    assert worst["gain"] == min(r["gain"] for r in found["results"] if (r["rule"], r["fraction"]) == ("all", 0.75))
    with (out / "redteam.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(found["results"])
    assert {r["success"] != "" for r in table if r["attack"].startswith("backdoor")} == {True}
    page = (out / "redteam.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("data:image/png;base64,") == 1
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    for name in ("redteam.png", "redteam.pdf"):
        assert (out / name).stat().st_size > 5000


def test_interrupted_and_resumed(tmp_path, monkeypatch, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert cli.main([*SMALL, *FEW, "--out", str(whole), "--quiet", "--stack", "5"]) == 0
    simulated, simulate_many = [], redteam_runs.simulate_many

    def counted(specs, *arguments, **options):
        if len(simulated) == 10:
            raise KeyboardInterrupt
        simulated.extend(specs)
        return simulate_many(specs, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(redteam_runs, "simulate_many", counted)
        assert cli.main([*SMALL, *FEW, "--out", str(cut), "--stack", "5"]) == 130
    assert "finished runs are kept; add --resume to continue" in capsys.readouterr().err
    assert not (cut / "redteam.json").exists()
    with (cut / "results.jsonl").open("a") as file:
        file.write('{"rule": "all", "att')  # as a kill leaves it
    assert cli.main([*SMALL, *FEW, "--out", str(cut)]) == 2
    assert cli.main([*SMALL, *FEW, "--out", str(cut), "--resume"]) == 0
    assert "10 runs have finished, 14 are left" in capsys.readouterr().out
    for name in ("results.jsonl", "redteam.json", "redteam.csv"):
        assert (cut / name).read_text() == (whole / name).read_text(), name


def test_a_resumed_red_team_may_grow_but_not_change(tmp_path, capsys):
    out = str(tmp_path / "out")
    small = ["redteam", "trust-synth", "--rounds", "2", "--fractions", "0.5", "--out", out, "--rules", "all"]
    assert cli.main([*small, "--seeds", "1", "--attacks", "zero", "--quiet"]) == 0
    assert cli.main([*small, "--seeds", "2", "--attacks", "zero,alie", "--resume"]) == 0
    assert "3 runs have finished, 5 are left" in capsys.readouterr().out
    assert cli.main([*small, "--seeds", "1", "--attacks", "zero", "--resume", "--quiet"]) == 0
    assert cli.main([*small, "--set", "local.lr=0.2", "--resume"]) == 2
    assert "local.lr was 0.1, is 0.2" in capsys.readouterr().err
    (tmp_path / "zero.toml").write_text('[adversary]\nkind = "sign-flip"\n')
    assert cli.main([*small, "--attacks", "zero.toml", "--resume"]) == 2
    assert "was run with other settings" in capsys.readouterr().err
    (tmp_path / "out" / "results.jsonl").write_text("{}\n{}\n")
    assert cli.main([*small, "--resume"]) == 2
    assert "is damaged in line 1" in capsys.readouterr().err


def test_stacks_share_poisoned_data_and_fit_into_memory():
    small = team(attacks=["zero", "label-flip"])
    cases = small.cases()
    assert [len(stack) for stack in stacks(small, cases, 6)] == [6, 6, 6, 4]
    assert [case for stack in stacks(small, cases) for case in stack] == cases
    assert stacks(small, []) == []


def test_a_run_that_diverged_counts_as_zero():
    small = team(attacks=["zero"], rules=["all"], fractions=[0.5])
    done = {case: Figures((0.5,) * 10) for case in small.cases()}
    done[Case("zero", 0.5, 1, "all")] = Figures((), (), "seed 1 diverged")
    (row,) = (row for row in table_of(small, done) if row.attack == "zero")
    assert (row.gain, row.worst_seed, row.diverged) == (-25, -50, 1)


def test_a_strike_is_judged_by_its_own_rounds():
    small = team(rules=["all"], fractions=[0.5])
    done = {case: Figures((0.8,) * 10) for case in small.cases()}
    for seed in (0, 1):
        done[Case("strike-sign-flip", 0.5, seed, "all")] = Figures((0.8,) * 7 + (0.1,) * 3)
    rows = table_of(small, done)
    (worst,) = (one for one in worst_cases(rows) if one.fraction == 0.5)
    assert (round(worst.gain), worst.attack) == (-70, "strike-sign-flip")


@pytest.mark.pictures
def test_the_heat_map_has_a_cell_for_each_rule_and_fraction():
    small = team(rules=["all", "auto"])
    rows = table_of(small, {case: Figures((0.5,) * 10) for case in small.cases()})
    (axes,) = heat_map(worst_cases(rows), "title").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["all", "auto"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["no attack", "25 % hostile", "50 % hostile"]
    assert len(axes.texts) == 12


def test_no_text_of_the_heat_map_hides_another_or_is_cut():
    small = team(rules=["all", "auto"])
    rows = table_of(small, {case: Figures((0.5,) * 10) for case in small.cases()})
    worst = [
        replace(one, rule=rule, gain=-78.44, worst_seed=-78.46)
        for one in worst_cases(rows)
        if one.rule == "auto"
        for rule in ("all", "all+geometric-median")
    ]
    figure = heat_map(worst, "title")
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    texts = [*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label]
    boxes = [text.get_window_extent() for text in texts]
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    assert all(figure.bbox.containsx(x) for box in boxes for x in (box.x0, box.x1))


def test_black_text_can_be_read_on_all_colours():
    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for gain in (*torch.linspace(-90, 20, 200).tolist(), 0.0, 4.0, 4.1):
        assert (luminance(tint(gain)) + 0.05) / 0.05 > 4.5, gain
    assert signed(-0.0) == "0.0"


@pytest.mark.parametrize("name", ["trust-fmnist", "trust-emnist", "trust-cifar10", "trust-synth"])
def test_the_trust_experiments(name):
    experiment = load(name)
    settings = experiment.settings
    assert (experiment.rounds, len(experiment.seeds), settings["warmup"], settings["free_cap"]) == (40, 5, 0.1, 1.0)
    assert settings["data"]["samples"] == 240
    if name == "trust-synth":
        roster = experiment.federation(0).roster
        assert (sum(roster.priority), len(roster)) == (4, 20)
    else:
        data = settings["data"]
        assert (data["clients"], data["priority"], data["shards"] * data["shard_size"]) == (20, 4, 240)
        for partition in ("shards", "dirichlet"):
            assert load(name, {"data.partition": partition}).settings["data"]["partition"] == partition
