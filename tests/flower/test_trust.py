"""The setting trust over Flower's messages: the simulation's decisions, also with a hostile majority of free nodes."""

import hostile_app
import hostile_task
import in_process
import numpy as np
import pytest
import torch
from hostile_task import ATTACKS, hostile_run
from in_process import DATA, history, model, weights

import fedalign as fa
from fedalign.flower import measuring
from fedalign.flower.roster_file import Entry, RosterFile, fingerprint
from fedalign.flower.settings import Settings

federation, keys = in_process.federation, in_process.keys
SGD = fa.LocalSGD(lr=0.1, epochs=2, batch_size=20)


def assert_alike(tmp_path, expected):
    """Compare a run over Flower with a simulated one: decisions, shares, traffic, promises, and weights."""
    rounds = history(tmp_path)
    assert len(rounds) == len(expected.history.rounds)
    for mine, theirs in zip(rounds, expected.history.rounds, strict=True):
        assert [c.decision for c in mine.clients] == [c.decision for c in theirs.clients]
        assert [c.weight for c in mine.clients] == pytest.approx([c.weight for c in theirs.clients])
        assert [(t.admitted, t.chosen) for t in mine.tried] == [(t.admitted, t.chosen) for t in theirs.tried]
        assert mine.test_accuracy == pytest.approx(theirs.test_accuracy)
        assert (mine.promise is None) == (theirs.promise is None)
    for key, value in expected.model.state_dict().items():
        assert torch.allclose(weights(tmp_path)[key], value, atol=1e-5)
    return rounds


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("fedalign-verified", fa.Verified()),
        ("fedalign", fa.Align(0.6)),
        ("auto", fa.AutoAlign()),
        ("all", fa.Everyone()),
        ("priority", fa.PriorityOnly()),
    ],
)
def test_verified_rounds_are_the_simulations(federation, tmp_path, name, rule):
    _, server = federation(rule=name, trust="verify")
    server().run()
    expected = fa.simulate(
        DATA.federation(seed=0), model, rule, 5, 0.1, SGD, device="cpu", free_cap=1.0, trust="verify"
    )
    rounds = assert_alike(tmp_path, expected)
    if name != "priority":
        assert all(r.promise is not None for r in rounds[1:])
        assert "admitted" in {c.decision for r in rounds for c in r.clients}


def test_a_deployment_verifies_unless_told_otherwise():
    config = {"model": "in_process:model", "data": "in_process:data"}
    inner = fa.Align(0.2, match_on="heldout")
    assert Settings.read(config).make_rule() == fa.Verified(inner)
    assert Settings.read({**config, "cosine": 0.1}).make_rule() == fa.Verified(inner, cosine=0.1)
    assert Settings.read({**config, "trust": "report"}).make_rule() == inner
    assert isinstance(Settings.read({**config, "rule": "priority"}).make_rule(), fa.PriorityOnly)
    own = Settings.read({**config, "rule": "fedalign-verified(length=1.5)", "trust": "report"}).make_rule()
    assert (own.length, own.match_on, type(own.rule)) == (1.5, "heldout", fa.Everyone)
    tight = Settings.read({**config, "trust": "verify(within=4.0)"}).make_rule()
    assert (tight.within, tight.cosine, tight.rule) == (4.0, fa.Verified().cosine, inner)
    with pytest.raises(fa.FedalignError, match="trust is 'none'; choose"):
        Settings.read({**config, "trust": "none"})


def test_a_run_of_before_believed_what_was_reported(federation, tmp_path):
    _, server = federation(rounds=1)
    server().run()
    config = tmp_path / "out" / "config.toml"
    lines = config.read_text().splitlines()
    config.write_text("\n".join(line for line in lines if not line.startswith("trust")))
    federation(rounds=1, resume=str(tmp_path / "out"))[1]()
    _, other = federation(rounds=1, resume=str(tmp_path / "out"), trust="verify")
    with pytest.raises(fa.FedalignError, match="other settings: trust was 'report', is 'verify'"):
        other()


def test_verifying_clients_need_held_out_data(federation):
    nodes = {k: {"partition-id": k, "heldout": k != 0} for k in range(6)}
    _, server = federation(nodes=nodes, rule="all", trust="verify", match_on="train", rounds=1)
    with pytest.raises(fa.FedalignError, match=r"not connected: site-0\)"):
        server().run()


def sizes(grid):
    """Give the shapes of the models that clients were asked to measure."""
    asked = [m for m in grid.sent if m.metadata.message_type == "evaluate"]
    return [np.atleast_2d(m.content["model"]["flat"].numpy()).shape for m in asked]


def test_large_questions_are_split(federation, tmp_path, monkeypatch):
    grid, server = federation(rule="all", trust="verify", out=str(tmp_path / "whole"))
    server().run()
    assert max(sizes(grid)) > (5, 610)
    monkeypatch.setattr(measuring, "_LARGEST", 2 * 610 * 4 + 5)
    grid, server = federation(rule="all", trust="verify")
    server().run()
    assert max(sizes(grid)) == (2, 610)
    assert history(tmp_path) == history(tmp_path, "whole")
    for key, value in weights(tmp_path, "whole").items():
        assert torch.equal(weights(tmp_path)[key], value)


@pytest.mark.parametrize("attacks", [ATTACKS, "label-flip; scaling(factor=9.9)", "sign-flip(scale=9.9)"])
def test_a_hostile_majority_changes_nothing_for_the_worse(federation, tmp_path, attacks):
    made = in_process.public_keys(hostile_task.CLIENTS)
    entries = (Entry(fingerprint(key), f"site-{k}", k < hostile_task.PRIORITY) for k, key in enumerate(made))
    RosterFile(tuple(entries)).write(tmp_path / "roster.toml")
    nodes = {k: {"partition-id": k} for k in range(hostile_task.CLIENTS)}
    for k in hostile_task.HOSTILE:
        nodes[k] |= hostile_task.hostile_config(attacks)
    task = {"model": "hostile_task:model", "data": "hostile_task:data"}
    grid, server = federation(nodes=nodes, **task, rule="all", trust="verify", warmup=0.0, lr=hostile_task.LR)
    grid.keys, grid.apps = made, dict.fromkeys(nodes, hostile_app.app)
    server().run()
    rounds = assert_alike(tmp_path, hostile_run(fa.Verified(), 5, attacks))
    assert {c.loss for c in rounds[1].clients[4:]} == {rounds[1].global_loss}  # as they claim
    alone, believed = (hostile_run(rule, 5, attacks).history.rounds[-1] for rule in (fa.PriorityOnly(), fa.Everyone()))
    assert rounds[-1].test_accuracy >= alone.test_accuracy - 0.01
    assert believed.test_accuracy < alone.test_accuracy - 0.1  # the attack is real
