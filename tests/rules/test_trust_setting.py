"""The setting trust: which rule runs, in Python, in experiments and on the command line."""

import tomllib

import pytest
import tomli_w
import torch
from conftest import federation

import fedalign as fa
from fedalign import cli
from fedalign.experiments.config import load
from fedalign.experiments.recorders import models_kept
from fedalign.experiments.store import RunStore
from fedalign.rules.trust import verify, with_trust

SGD = fa.LocalSGD(lr=0.1, epochs=2, batch_size=20)


def model():
    return torch.nn.Linear(6, 4)


def run(rule, **options):
    return fa.simulate(federation(), model, rule, 4, 0.0, options.pop("local", SGD), device="cpu", **options)


def test_verify_is_the_verified_rule():
    mine, theirs = run(fa.Align(0.6), trust="verify"), run(fa.Verified(fa.Align(0.6)))
    assert mine.history.rounds == theirs.history.rounds
    assert torch.equal(mine.model.weight, theirs.model.weight)
    assert mine.history.rounds != run(fa.Align(0.6)).history.rounds
    assert all(r.promise is not None for r in mine.history.rounds)


@pytest.mark.parametrize("rule", [fa.PriorityOnly(), fa.Alone()])
def test_what_admits_nobody_stays_as_it_is(rule):
    assert run(rule, trust="verify").history.rounds == run(rule).history.rounds


def test_scaffold_is_refused():
    scaffold = fa.LocalSGD(lr=0.1, epochs=1, scaffold=True)
    with pytest.raises(fa.FedalignError, match=r'SCAFFOLD cannot be combined with a verified rule \(trust="verify"\)'):
        run(fa.Everyone(), trust="verify", local=scaffold)
    run(fa.PriorityOnly(), trust="verify", local=scaffold)


def test_another_value_is_refused():
    with pytest.raises(fa.FedalignError, match="trust is 'always'; choose 'report' or 'verify'"):
        run(fa.Align(), trust="always")


def test_verify_takes_the_options_of_the_verified_rule():
    assert with_trust(fa.Align(0.6), "verify(within=4.0, probes=8)") == fa.Verified(fa.Align(0.6), within=4.0, probes=8)
    own = fa.Verified(length=1.5)
    assert with_trust(own, "verify(within=4.0)") is own
    open_to_all = run(fa.Verified(alike=float("inf"))).history
    assert run(fa.Everyone(), trust="verify(alike=inf)").history.rounds == open_to_all.rounds
    changed = {
        "trust": "verify(within=4.0)",
        "arms": ["fedalign", "tight"],
        "arm.tight": {"rule": "auto", "trust": "verify(within=1)"},
    }
    rules = {arm: spec.rule for arm, _, spec in load("synth-low", {**changed, "seeds": 1}).specs()}
    assert (rules["fedalign"].within, rules["tight"].within, type(rules["tight"].rule)) == (4.0, 1.0, fa.AutoAlign)


@pytest.mark.parametrize(
    ("trust", "message"),
    [
        ("verify(widthin=4.0)", "trust has no option 'widthin'; did you mean 'within'"),
        ("verify(within=0)", "Verified's within must be a number above 0, not 0"),
        ("verify(within='wide')", "trust.within must be a number, not 'wide'"),
        ("verify(within=4", "cannot read the options|is neither a name nor"),
        ("report(within=4.0)", "choose 'report' or 'verify', which may have options"),
        (3, "trust is 3; choose"),
    ],
)
def test_wrong_options_of_trust_are_refused(trust, message):
    with pytest.raises(fa.FedalignError, match=message):
        run(fa.Align(), trust=trust)


def test_a_rule_with_rounds_of_its_own_cannot_be_verified():
    class Own(fa.Everyone):
        algorithm = "mine:rounds"

    assert with_trust(Own(), "report").algorithm == "mine:rounds"
    with pytest.raises(fa.FedalignError, match=r"Own runs the algorithm 'mine:rounds', .* use trust='report'"):
        verify(Own())


def test_arms_of_an_experiment():
    arms = {"arms": ["priority", "local", "fedalign", "believing"], "arm.believing.rule": "fedalign"}
    rules = {arm: spec.rule for arm, _, spec in load("synth-low", {**arms, "seeds": 1}).specs()}
    assert not any(isinstance(rule, fa.Verified) for rule in rules.values())
    changed = {**arms, "seeds": 1, "trust": "verify", "arm.believing.trust": "report"}
    specs = {arm: spec for arm, _, spec in load("synth-low", changed).specs()}
    assert isinstance(specs["fedalign"].rule, fa.Verified)
    assert specs["fedalign"].rule.rule == rules["fedalign"] == specs["believing"].rule
    assert isinstance(specs["priority"].rule, fa.PriorityOnly)
    assert isinstance(specs["local"].rule, fa.Alone)
    assert models_kept(specs["fedalign"]) == 3
    with pytest.raises(fa.FedalignError, match="trust is 'never'; choose 'report' or 'verify'"):
        load("synth-low", {"trust": "never"})
    with pytest.raises(fa.FedalignError, match=r"arm\.fedalign\.trust must be"):
        load("synth-low", {"arm.fedalign.trust": 3})


def test_the_command_line_and_old_folders(tmp_path, capsys):
    settings = ["run", "synth-low", "--arms", "fedalign", "--seeds", "1", "--rounds", "3", "--quiet", "--device", "cpu"]
    out = {name: tmp_path / name for name in ("report", "verify")}
    assert cli.main([*settings, "--out", str(out["report"])]) == 0
    assert cli.main([*settings, "--set", "trust=verify", "--out", str(out["verify"])]) == 0
    rounds = {name: RunStore(folder / "fedalign" / "seed-0").history().rounds for name, folder in out.items()}
    assert [r.promise is not None for r in rounds["report"]] == [False] * 3
    assert rounds["verify"][-1].promise is not None
    config = tomllib.loads((out["report"] / "config.toml").read_text())
    assert config.pop("trust") == "report"
    (out["report"] / "config.toml").write_text(tomli_w.dumps(config))  # as written before there was this setting
    assert cli.main([*settings, "--resume", "--out", str(out["report"])]) == 0
    capsys.readouterr()
    assert cli.main([*settings, "--resume", "--set", "trust=verify", "--out", str(out["report"])]) == 2
    assert "trust was 'report', is 'verify'" in capsys.readouterr().err
