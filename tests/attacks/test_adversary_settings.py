"""The section [adversary] of experiments and the argument of simulate: notations, refusals, output and report."""

import json
import tomllib

import pytest
from conftest import federation, linear

import fedalign as fa
from fedalign import cli
from fedalign.attacks.settings import as_adversary, in_words, resolve_adversary
from fedalign.experiments.config import load

pytestmark = pytest.mark.slow

RUN = ["run", "synth-low", "--seeds", "2", "--rounds", "6", "--quiet"]


@pytest.mark.parametrize(
    "given",
    [
        "backdoor(target=3); at-cosine(cosine=0.5)",
        {"kind": "backdoor(target=3); at-cosine(cosine=0.5)"},
        {"kind": ["backdoor(target=3)", {"kind": "at-cosine", "cosine": 0.5}]},
    ],
)
def test_the_notations_mean_the_same(given):
    adversary = as_adversary(given)
    assert adversary == fa.Adversary(["backdoor(target=3)", "at-cosine(cosine=0.5)"])
    assert as_adversary(adversary) is adversary
    assert as_adversary(None) is None


def test_the_options_of_one_attack_may_stand_in_the_section():
    table = {"kind": "sign-flip", "scale": 9.9, "fraction": 0.5, "last": 3, "report": "truthful"}
    assert as_adversary(table) == fa.Adversary("sign-flip(scale=9.9)", 0.5, last=3, report="truthful")
    assert resolve_adversary(resolve_adversary(table)) == resolve_adversary(table)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sing-flip", "adversary.kind is 'sing-flip'; did you mean 'sign-flip'?"),
        ({"fraction": 0.5}, "adversary.kind is missing; known: alie,"),
        ({"kind": "sign-flip", "scael": 2}, "unknown key adversary.scael; did you mean 'scale'?"),
        ({"kind": "sign-flip", "fractoin": 2}, "unknown key adversary.fractoin; did you mean 'fraction'?"),
        ({"kind": "sign-flip(scale=2)", "scale": 3}, "adversary.scale is given twice"),
        ({"kind": ["zero", "sign-flip"], "scale": 3}, "adversary.scale belongs to one attack"),
        ({"kind": []}, "adversary.kind must name an attack, or be a list of attacks, not []"),
        ({"kind": 3}, "adversary.kind must name an attack, or be a list of attacks, not 3"),
        ({"kind": "zero", "fraction": 1.5}, "adversary.fraction must be a part of the free clients, 0 to 1, not 1.5"),
        ({"kind": "zero", "fraction": "half"}, "adversary.fraction must be a number, not 'half'"),
        ({"kind": "zero", "report": "nothing"}, "adversary.report must be 'aligned', 'truthful', 'high' or 'low'"),
        ({"kind": "zero", "knows": "some"}, "adversary.knows must be 'all' or 'own', not 'some'"),
        ({"kind": "zero", "last": 0}, "adversary.last must be a number of rounds, at least 1, not 0"),
        ({"kind": "zero", "period": 1.5}, "adversary.period must be a whole number, not 1.5"),
        ({"kind": "zero", "samples": 0}, "adversary.samples must be a positive factor, not 0"),
        ({"kind": "zero", "start": -1}, "adversary.start must be a round or a fraction of the rounds, not -1"),
        (7, "adversary must be a section [adversary] or a text, not 7"),
    ],
)
def test_refusals(given, message):
    with pytest.raises(fa.FedalignError) as error:
        resolve_adversary(given)
    assert message in str(error.value)


def test_a_refusal_writes_nothing(tmp_path, capsys):
    out = tmp_path / "out"
    for text in ("adversary.kind=sing-flip", "adversary.fraction=0.5"):
        assert cli.main([*RUN, "--set", text, "--out", str(out)]) == 2
    named = ["--set", "adversary.kind=zero", "--set", 'adversary.clients=["nobody"]']
    assert cli.main([*RUN, *named, "--out", str(out)]) == 2
    assert "names 'nobody', which is no free client" in capsys.readouterr().err
    assert not out.exists()


def test_simulate_takes_every_notation():
    options = {"rounds": 2, "warmup": 0, "device": "cpu"}
    table = {"kind": "sign-flip", "fraction": 1.0}
    runs = [
        fa.simulate(federation(), linear, "all", adversary=adversary, **options).history
        for adversary in (table, fa.Adversary("sign-flip", fraction=1.0))
    ]
    assert runs[0] == runs[1]
    with pytest.raises(fa.FedalignError, match=r"adversary must be a fedalign\.Adversary object, not 3"):
        fa.simulate(federation(), linear, "all", adversary=3, **options)


def test_a_run_with_a_backdoor(tmp_path, capsys):
    out = tmp_path / "out"
    run = [*RUN[:-1], "--arms", "priority,all", "--out", str(out), "--set", "adversary.fraction=0.5"]
    run += ["--set", "adversary.kind=backdoor(target=1)"]
    assert cli.main(run) == 0
    assert "backdoor %" in capsys.readouterr().out
    config = tomllib.loads((out / "config.toml").read_text())["adversary"]
    assert (config["fraction"], config["kind"][0]["target"]) == (0.5, 1)
    summary = json.loads((out / "summary.json").read_text())
    success = summary["arms"]["all"]["attack_success"]
    assert len(success["per_seed"]) == 2
    assert success["mean"] > summary["arms"]["priority"]["attack_success"]["mean"]
    assert {seed: len(names) for seed, names in summary["hostile"].items()} == {"0": 5, "1": 5}
    page = (out / "report.html").read_text()
    assert "50 % of the free clients are hostile: backdoor(target=1" in page
    assert "backdoor %" in page
    assert cli.main([*run, "--resume"]) == 0
    assert cli.main([*run[:-2], "--set", "adversary.kind=zero", "--resume"]) == 2
    assert "was run with other settings" in capsys.readouterr().err


def test_without_a_backdoor_there_is_no_success(tmp_path):
    for name, further in (("none", []), ("zero", ["--set", "adversary.kind=zero"])):
        assert cli.main([*RUN, "--arms", "all", "--out", str(tmp_path / name), *further]) == 0
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert "attack_success" not in summary["arms"]["all"]
        assert ("hostile" in summary) == (name == "zero")
        assert ("[adversary]" in (tmp_path / name / "config.toml").read_text()) == (name == "zero")


def test_an_attack_of_the_users_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import fedalign as fa\n\n\nclass Evil(fa.Attack):\n    changes_updates = True\n\n"
        "    def __init__(self, times: float = 2.0):\n        self.times = times\n\n"
        "    def send(self, updates, scene):\n"
        "        return {k: -self.times * update for k, update in updates.own.items()}\n"
    )
    experiment = load("synth-low", {"adversary.kind": "mine:Evil", "adversary.times": 3}, tmp_path)
    assert experiment.settings["adversary"]["kind"] == [{"kind": "mine:Evil", "times": 3.0}]
    assert experiment.adversary.attacks[0].times == 3.0
    with pytest.raises(fa.FedalignError, match=r"unknown key adversary\.tmies; did you mean 'times'"):
        load("synth-low", {"adversary.kind": "mine:Evil", "adversary.tmies": 3}, tmp_path)


def test_words():
    table = {"kind": "zero", "clients": ["a", "b"], "last": 3, "period": 2, "report": "low", "samples": 10}
    assert in_words(resolve_adversary(table)) == (
        "a, b are hostile: zero, in the last 3 rounds alone, 2 rounds on and 2 off. "
        "They report a hundredth of F and 10 times their sample count."
    )
    assert "from round 20 on" in in_words(resolve_adversary({"kind": "zero", "start": 20}))
    assert "after 50 % of the rounds" in in_words(resolve_adversary({"kind": "zero", "start": 0.5}))
    assert "know only their own" in in_words(resolve_adversary({"kind": "zero", "knows": "own"}))
