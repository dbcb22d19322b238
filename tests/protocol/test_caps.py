"""Caps on the weight of free clients hold, whatever clients report and rules select, in both drivers."""

import math
import tomllib

import pytest
import tomli_w
import torch
from conftest import blobs, federation, linear
from hypothesis import given
from hypothesis import strategies as st

import fedalign as fa
from fedalign import cli
from fedalign.experiments.config import load
from fedalign.experiments.store import RunStore
from fedalign.flower.settings import Settings
from fedalign.protocol.aggregate import shares
from fedalign.protocol.messages import Present
from fedalign.protocol.roster import Roster

caps = st.one_of(st.just(math.inf), st.floats(1e-6, 1e6))


@st.composite
def aggregates(draw):
    """Draw a roster with caps, who is reachable, and a selection with weights and scales."""
    priority, free = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    many = priority + free
    samples = tuple(draw(st.lists(st.integers(1, 10**9), min_size=many, max_size=many)))
    roles = (True,) * priority + (False,) * free
    roster = Roster(tuple(map(str, range(many))), roles, samples, draw(caps), draw(caps))
    selected = draw(st.lists(st.sampled_from(range(priority, many)), unique=True))
    trained = draw(st.lists(st.sampled_from(range(priority)), unique=True, min_size=1))
    drawn = draw(st.booleans())
    draws = {k: draw(st.integers(1, 5)) for k in trained} if drawn else None
    numbers = st.floats(0, 1e12)
    weight = draw(st.dictionaries(st.sampled_from(selected), numbers)) if selected else {}
    scale = draw(st.dictionaries(st.sampled_from(selected), numbers)) if selected else {}
    return Present(roster, (True,) * many, draws), trained, fa.Selection(tuple(selected), weight=weight, scale=scale)


@given(aggregates())
def test_the_caps_hold_whatever_a_rule_selects(case):
    present, trained, selection = case
    found = shares(present, sorted([*trained, *selection.clients]), selection)
    roster = present.roster
    assert math.fsum(found.values()) == pytest.approx(1)
    assert all(share >= 0 for share in found.values())
    here = math.fsum(found[k] for k in trained)
    free = {k: share for k, share in found.items() if k not in trained}
    assert math.fsum(free.values()) <= roster.free_total * here * (1 + 1e-9)
    if selection.weight or selection.scale or present.draws:
        assert all(share <= roster.free_cap * here * (1 + 1e-9) for share in free.values())
    uncapped = Roster(roster.names, roster.priority, roster.samples, roster.free_cap)
    plain = shares(Present(uncapped, present.reachable, present.draws), sorted(found), selection)
    # Priority clients keep their proportions, as do free ones among themselves.
    for group in (trained, list(free)):
        total, before = (math.fsum(of[k] for k in group) for of in (found, plain))
        if total > 1e-300 and before > 1e-300:
            assert [found[k] / total for k in group] == pytest.approx([plain[k] / before for k in group])


def test_a_cap_on_all_by_hand():
    roster = Roster(("a", "b", "c"), (True, False, False), (10, 30, 10), free_total=0.5)
    assert shares(Present(roster, (True,) * 3), [0, 1, 2]) == pytest.approx({0: 2 / 3, 1: 0.25, 2: 1 / 12})
    assert shares(Present(roster, (True,) * 3), [0]) == {0: 1.0}


@pytest.mark.parametrize("rule", [fa.Everyone(), fa.Align(9.0), fa.AutoAlign(), fa.TrustWeighted(), fa.LossWeighted(3)])
def test_a_simulation_has_the_caps_of_a_deployment(rule):
    clients = [blobs(20, 0), blobs(20, 1), blobs(600, 2), blobs(400, 3)]
    fed = fa.Federation.from_arrays(clients, priority=[True, True, False, False])
    for options in ({"free_cap": 0.25}, {"free_total": 0.3}, {"free_cap": 0.25, "free_total": 0.3}):
        result = fa.simulate(fed, linear, rule, 3, 0, device="cpu", **options)
        for record in result.history.rounds:
            here = record.clients[0].weight + record.clients[1].weight
            free = [c.weight for c in record.clients[2:]]
            assert max(free) <= options.get("free_cap", math.inf) * here + 1e-9
            assert sum(free) <= options.get("free_total", math.inf) * here + 1e-9
    assert (
        sum(c.weight for c in fa.simulate(fed, linear, fa.Everyone(), 1, 0, device="cpu").history[0].clients[2:]) > 0.9
    )


def test_without_a_cap_nothing_changes():
    runs = [
        fa.simulate(federation(), linear, fa.Everyone(), 2, 0, device="cpu", **options)
        for options in ({}, {"free_cap": 1e9, "free_total": 1e9})
    ]
    assert torch.equal(runs[0].model.weight, runs[1].model.weight)


@pytest.mark.parametrize("cap", ["free_cap", "free_total"])
@pytest.mark.parametrize("value", [0, -1, math.nan, True, "much"])
def test_caps_are_checked(cap, value):
    with pytest.raises(fa.FedalignError, match=cap):
        fa.simulate(federation(), linear, rounds=1, device="cpu", **{cap: value})
    with pytest.raises(fa.FedalignError, match=cap):
        load("synth-low", {cap: value})


def test_caps_in_toml_and_on_a_resume(tmp_path, capsys):
    settings = ["run", "synth-low", "--arms", "all", "--seeds", "1", "--rounds", "2", "--quiet", "--set", "warmup=0"]
    settings += ["--set", "data.samples=40", "--device", "cpu"]
    assert cli.main([*settings, "--set", "free_total=0.5", "--out", str(tmp_path / "a")]) == 0
    record = RunStore(tmp_path / "a" / "all" / "seed-0").history()[0]
    assert sum(c.weight for c in record.clients if not c.priority) == pytest.approx(1 / 3)
    assert tomllib.loads((tmp_path / "a" / "config.toml").read_text())["free_cap"] == math.inf
    assert cli.main([*settings, "--out", str(tmp_path / "b")]) == 0
    # A folder of an earlier version names no caps.
    config = tomllib.loads((tmp_path / "b" / "config.toml").read_text())
    old = {key: value for key, value in config.items() if key not in ("free_cap", "free_total")}
    (tmp_path / "b" / "config.toml").write_text(tomli_w.dumps(old))
    assert cli.main([*settings, "--resume", "--out", str(tmp_path / "b")]) == 0
    capsys.readouterr()
    assert cli.main([*settings, "--resume", "--set", "free_cap=2", "--out", str(tmp_path / "b")]) == 2
    assert "free_cap was inf, is 2" in capsys.readouterr().err


def test_caps_over_flower_are_checked():
    required = {"model": "app.task:model", "data": "app.task:data"}
    assert Settings.read({**required, "free-total": 0.5}).free_total == 0.5
    with pytest.raises(fa.FedalignError, match="free-total must be at least 0, not -1"):
        Settings.read({**required, "free-total": -1.0})


def test_the_theorems_know_no_caps():
    experiment = load("theory-quadratic", {"free_cap": 0.5})
    with pytest.raises(fa.FedalignError, match=r"the theorems are about the weights p_k, but free_cap = 0\.5"):
        experiment.specs()
