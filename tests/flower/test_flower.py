"""The federation over Flower's messages, with the ClientApps called in this process: no network, all the logic."""

import base64
import re
import tomllib
from pathlib import Path

import in_process
import numpy as np
import pytest
import tomli_w
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message
from in_process import DATA, history, model, weights
from safetensors.torch import save_file

import fedalign as fa
from fedalign.flower.new_app import create
from fedalign.flower.roster_file import Entry, RosterFile, fingerprint
from fedalign.flower.settings import Settings, function

federation, keys = in_process.federation, in_process.keys


def simulated(rule, rounds=5):
    local = fa.LocalSGD(lr=0.1, epochs=2, batch_size=20)
    return fa.simulate(DATA.federation(seed=0), model, rule, rounds, 0.1, local, device="cpu")


@pytest.mark.parametrize(
    ("name", "rule"), [("fedalign", fa.Align(0.6)), ("auto", fa.AutoAlign()), ("all", fa.Everyone())]
)
def test_it_decides_and_learns_as_the_simulation(federation, tmp_path, name, rule):
    _, server = federation(rule=name)
    server().run()
    expected = simulated(rule)
    rounds = history(tmp_path)
    assert len(rounds) == 5
    for mine, theirs in zip(rounds, expected.history.rounds, strict=True):
        assert [c.decision for c in mine.clients] == [c.decision for c in theirs.clients]
        assert [c.weight for c in mine.clients] == pytest.approx([c.weight for c in theirs.clients])
        assert mine.test_accuracy == pytest.approx(theirs.test_accuracy)
        assert [t.admitted for t in mine.tried] == [t.admitted for t in theirs.tried]
    decisions = {c.decision for r in rounds for c in r.clients if not c.priority}
    assert "admitted" in decisions
    if name != "all":
        assert decisions & {"declined", "refused"}
    for key, value in expected.model.state_dict().items():
        assert torch.allclose(weights(tmp_path)[key], value, atol=1e-5)


def test_what_is_measured_next_is_measured_with_the_test_data(federation, tmp_path):
    grid, server = federation(rule="auto", warmup=0.0)
    server().run()
    assert all(r.fallback.apart for r in history(tmp_path))
    assert any(r.base for r in history(tmp_path)[:-1])
    kinds = [message.metadata.message_type for message in grid.sent if message.metadata.dst_node_id == 100]
    first = ["query.hello", "evaluate", "train", "evaluate", "evaluate"]  # F(w), candidates, test and the next F(w)
    last = ["evaluate"]  # the final model, for clients.json
    # Then both models are trained, the candidates are measured, and with their own model all that is asked next.
    assert kinds == first + ["train", "evaluate", "evaluate"] * 4 + last


def test_a_free_node_that_says_priority_is_free(federation, tmp_path):
    nodes = {k: {"partition-id": k} for k in range(6)}
    nodes[5] = {"partition-id": 5, "priority": True}
    _, server = federation(nodes=nodes, rule="fedalign")
    server().run()
    assert [c.priority for c in history(tmp_path)[0].clients] == [True, True, False, False, False, False]


@pytest.mark.parametrize("unknown", ["refuse", "free"])
def test_a_node_whose_key_is_none_is_left_out_and_reported_once(federation, tmp_path, caplog, keys, unknown):
    point = b"ecdsa-sha2-nistp256 " + base64.b64encode(
        b"".join(
            len(part).to_bytes(4, "big") + part for part in (b"ecdsa-sha2-nistp256", b"nistp256", b"\2" + bytes(32))
        )
    )  # of which the reader says that it has not implemented it
    grid, server = federation(rule="all", rounds=2, warmup=0.0)
    entries = RosterFile.read(tmp_path / "roster.toml").entries
    RosterFile(entries, unknown).write(tmp_path / "roster.toml")
    grid.keys = [*keys[:4], b"\x1b[2J junk", point]
    server().run()
    assert [c.decision for c in history(tmp_path)[1].clients] == ["trained"] * 2 + ["admitted"] * 2 + ["absent"] * 2
    said = [r.getMessage() for r in caplog.records if "takes no part" in r.getMessage()]
    assert [line.split(":")[0] for line in said] == ["node 104 takes no part", "node 105 takes no part"]
    assert "this is not a public key" in said[0]


def test_unknown_keys_are_refused_or_free(federation, tmp_path, keys):
    nodes = {k: {"partition-id": min(k, 5)} for k in range(7)}
    grid, server = federation(nodes=nodes, rule="all", rounds=1)
    server().run()
    assert len(history(tmp_path)[0].clients) == 6
    assert all(m.metadata.dst_node_id != 106 for m in grid.sent)
    roster = RosterFile.read(tmp_path / "roster.toml")
    RosterFile(roster.entries, "free").write(tmp_path / "roster.toml")
    _, server = federation(nodes=nodes, rule="all", rounds=1, out=str(tmp_path / "open"))
    server().run()
    last = history(tmp_path, "open")[0].clients[6]
    assert (last.name, last.priority, last.decision) == (f"node-{fingerprint(keys[6])[:8]}", False, "admitted")


def scaled(by):
    def change(reply, message):
        if "model" in reply.content:
            mine = reply.content["model"]["flat"].numpy()
            theirs = message.content["model"]["flat"].numpy()
            reply.content["model"] = ArrayRecord({"flat": Array(theirs + (mine - theirs) * by)})
            reply.content["measures"]["own.loss"] = float(message.content["task"]["loss"])
        return reply

    return change


def arrays(make):
    def change(reply, message):
        if "model" in reply.content:
            reply.content["model"] = ArrayRecord({"flat": Array(make(reply.content["model"]["flat"].numpy()))})
        return reply

    return change


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (arrays(lambda a: a * np.float32("nan")), "its trained weights are not finite"),
        (arrays(lambda a: a[:-1]), "its model has shape (609,), not (610,)"),
        (arrays(lambda a: a.astype(np.float64)), "its model is of type float64, not float32"),
        (arrays(lambda a: a.astype("S4")), "its model is of type"),
        (scaled(np.float32(1e6)), "times as long as the longest of the priority clients"),
    ],
)
def test_hostile_updates_are_refused_with_the_reason(federation, tmp_path, tamper, reason):
    nodes = {k: {"partition-id": k} for k in range(5)}
    _, server = federation(nodes=nodes, rule="all", out=str(tmp_path / "without"))
    server().run()
    grid, server = federation(rule="all")
    grid.tamper[5] = tamper
    server().run()
    for record in history(tmp_path)[1:]:
        assert record.clients[5].decision == "refused"
        assert reason in record.clients[5].reason
    for key, value in weights(tmp_path, "without").items():
        assert torch.allclose(weights(tmp_path)[key], value, atol=1e-6)


def overflowing(which, rounds):
    """Make the first or the second model that a priority client trains not finite, in some rounds."""

    def change(reply, message):
        if "model" in reply.content and int(message.content["task"]["round"]) in rounds:
            models = np.atleast_2d(reply.content["model"]["flat"].numpy().copy())
            if len(models) > which:
                models[which] *= np.float32("nan")
            rounds.remove(int(message.content["task"]["round"]))
            reply.content["model"] = ArrayRecord({"flat": Array(models if len(models) > 1 else models[0])})
        return reply

    return change


def trained_by(grid, k):
    """Give the rounds that a node was asked to train in, and how many models."""
    asked = [m for m in grid.sent if m.metadata.message_type == "train" and m.metadata.dst_node_id == 100 + k]
    return [(int(m.content["task"]["round"]), len(np.atleast_2d(m.content["model"]["flat"].numpy()))) for m in asked]


@pytest.mark.parametrize("rule", ["auto", "all"])
def test_a_priority_client_whose_training_overflows(federation, tmp_path, rule):
    grid, server = federation(rule=rule, warmup=0.0, rounds=4)
    grid.tamper[0] = overflowing(0, [2] if rule == "auto" else [0])
    if rule == "all":  # there is no fallback
        with pytest.raises(fa.FedalignError, match=r"paused before round 0.*site-0"):
            server().run()
        return
    server().run()
    rounds = history(tmp_path)
    assert len(rounds) == 4
    assert trained_by(grid, 0)[:4] == [(0, 1), (1, 2), (2, 2), (2, 1)]  # the round is begun again
    assert rounds[2].models_up == 2 + 6 + 6  # the priority clients' two, and those of all
    assert rounds[1].fallback.apart
    # Where it is their own model's training that overflows, that model stays as it is.
    grid, server = federation(rule=rule, warmup=0.0, rounds=4, out=str(tmp_path / "own"))
    grid.tamper[0] = overflowing(1, [0, 1, 2, 3])
    server().run()
    assert trained_by(grid, 0) == [(0, 1), (1, 2), (2, 2), (3, 2)]
    assert all(r.fallback.apart for r in history(tmp_path, "own"))


def test_a_huge_sample_count_is_capped(federation, tmp_path):
    def boast(reply, message):
        if "samples" in reply.content:
            reply.content["samples"]["train"] = 10**9
        return reply

    grid, server = federation(rule="all", rounds=2, free_cap=0.5)
    grid.tamper[5] = boast
    server().run()
    shares = [c.weight for c in history(tmp_path)[1].clients]
    assert shares[5] == pytest.approx(0.5 * sum(shares[:2]))
    roster = RosterFile.read(tmp_path / "roster.toml")
    capped = roster.adding(Entry(roster.entries[5].key, "site-5", samples=12))
    capped.write(tmp_path / "roster.toml")
    grid, server = federation(rule="all", rounds=2, out=str(tmp_path / "again"))
    grid.tamper[5] = boast
    server().run()
    shares = [c.weight for c in history(tmp_path, "again")[1].clients]
    assert shares[5] == pytest.approx(12 / 96 * sum(shares[:2]))


def test_all_free_clients_together_are_capped(federation, tmp_path):
    _, server = federation(rule="all", rounds=2, free_total=0.4)
    server().run()
    shares = [c.weight for c in history(tmp_path)[1].clients]
    assert sum(shares[2:]) == pytest.approx(0.4 * sum(shares[:2]))
    assert all(share > 0 for share in shares)


def test_a_lost_free_node_is_lost_and_no_more(federation, tmp_path):
    grid, server = federation(rule="all")
    fallen = []

    def fall(reply, message):
        if message.metadata.message_type == "train" and len(fallen) < 2:
            fallen.append(1)
            return Message(Error(5, "Node unavailable"), reply_to=message) if len(fallen) == 1 else None
        return reply

    grid.tamper[3] = fall
    server().run()
    clients = [r.clients[3] for r in history(tmp_path)[1:]]  # the first is the warm-up
    assert [c.decision for c in clients] == ["lost", "lost", "absent", "absent"]  # both count as misses
    assert clients[0].reason == "its node has stopped answering"
    assert clients[1].reason == "no answer in 0.3 s"
    assert clients[2].reason == "benched for 2 more rounds: no answer in 0.3 s"
    assert {c.decision for r in history(tmp_path)[1:] for c in r.clients[4:]} == {"admitted"}


def test_a_lost_priority_node_pauses_the_run_which_goes_on(federation, tmp_path):
    _, server = federation(rule="auto", out=str(tmp_path / "whole"))
    server().run()
    grid, server = federation(rule="auto")
    trained = []

    def fall(reply, message):
        if message.metadata.message_type == "train":
            trained.append(1)
            if len(trained) > 3:
                return None
        return reply

    grid.tamper[1] = fall
    with pytest.raises(
        fa.FedalignError, match=r"paused before round \d: the priority clients' quorum of 1.*site-1.*resume="
    ):
        server().run()
    done = history(tmp_path)
    assert 0 < len(done) < 5
    _, again = federation(rule="auto", resume=str(tmp_path / "out"))
    again().run()
    assert history(tmp_path) == history(tmp_path, "whole")
    for key, value in weights(tmp_path, "whole").items():
        assert torch.equal(weights(tmp_path)[key], value)


def test_with_a_smaller_quorum_it_goes_on_without(federation, tmp_path):
    grid, server = federation(rule="fedalign", quorum=0.5)
    grid.tamper[1] = lambda reply, message: None if message.metadata.message_type == "train" else reply
    server().run()
    assert [r.clients[1].decision for r in history(tmp_path)] == ["lost"] * 5


def test_a_round_without_a_quorum_is_repeated(federation, tmp_path):
    grid, server = federation(rule="fedalign", repeats=2)
    failures = [1, 1]

    def fall(reply, message):
        return None if message.metadata.message_type == "train" and failures and failures.pop() else reply

    grid.tamper[0] = fall
    server().run()
    assert [r.round for r in history(tmp_path)] == [0, 1, 2, 3, 4]


def test_when_every_free_node_declines_it_is_priority(federation, tmp_path):
    _, server = federation(rule="priority", out=str(tmp_path / "alone"))
    server().run()
    nodes = {k: {"partition-id": k, **({"opt-out": True} if k > 1 else {})} for k in range(6)}
    _, server = federation(nodes=nodes, rule="all")
    server().run()
    assert {c.reason for r in history(tmp_path) for c in r.clients if c.decision == "declined"} == {"opted out"}
    for key, value in weights(tmp_path, "alone").items():
        assert torch.equal(weights(tmp_path)[key], value)


def test_a_late_free_node_joins(federation, tmp_path):
    grid, server = federation(nodes={k: {"partition-id": k} for k in range(5)}, rule="all", rounds=3)
    made = server()
    original, calls = grid.get_nodes, []

    def later():
        calls.append(1)
        if len(calls) > 2:
            grid.nodes[5] = {"partition-id": 5}
        return original()

    grid.get_nodes = later
    made.run()
    decisions = [r.clients[5].decision for r in history(tmp_path)]
    assert (decisions[0], decisions[-1]) == ("absent", "admitted")


def changed(what, when=lambda name, message: True):
    """Replace losses that a node measures."""

    def change(reply, message):
        for name in list(reply.content["measures"]) if "measures" in reply.content else ():
            if name.endswith("loss") and when(name, message):
                reply.content["measures"][name] = what
        return reply

    return change


def test_a_loss_that_is_no_number(federation, tmp_path):
    # A free client's has no place among the others'.
    grid, server = federation(rule="auto", warmup=0.0)
    grid.tamper[5] = changed(float("nan"))
    server().run()
    assert {r.clients[5].decision for r in history(tmp_path)} == {"lost"}
    # A value from an evaluator speaks against that candidate alone.
    grid, server = federation(rule="auto", warmup=0.0, out=str(tmp_path / "evaluated"))
    widest = {0: changed(float("nan"), lambda name, message: name == "heldout-4.loss")}
    grid.tamper.update(widest)
    server().run()
    tried = [r.tried for r in history(tmp_path, "evaluated")]
    assert [[t.loss is None for t in one] for one in tried] == [[False] * 4 + [True]] * 5
    # The loss of the training model: the round begins again from the priority-only model, or the run pauses.
    grid, server = federation(rule="auto", warmup=0.0, out=str(tmp_path / "base"))
    seen = []

    def once(name, message):
        seen.append(name)
        return name == "heldout-0.loss" and seen.count(name) == 6

    grid.tamper[0] = changed(float("nan"), once)
    server().run()
    assert len(history(tmp_path, "base")) == 5


@pytest.mark.parametrize(("rule", "left_out"), [("auto", True), ("all", False), ("eager_rule:Eager", True)])
def test_evaluators_need_held_out_data(federation, tmp_path, monkeypatch, rule, left_out):
    """Priority clients that choose among candidates need held-out data; free clients need what is matched on."""
    (tmp_path / "eager_rule.py").write_text("import fedalign as fa\n\nclass Eager(fa.AutoAlign):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    nodes = {k: {"partition-id": k, "heldout": k not in (0, 5)} for k in range(6)}
    _, server = federation(nodes=nodes, rule=rule, match_on="train", rounds=1, warmup=0.0)
    if left_out:
        with pytest.raises(fa.FedalignError, match=r"paused before round 0: .*not connected: site-0\)"):
            server().run()
        return
    server().run()
    assert [c.decision for c in history(tmp_path)[0].clients] == ["trained"] * 2 + ["admitted"] * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unknown = 'maybe'", "unknown must be 'refuse' or 'free'"),
        ("clients = 3", "unknown key 'clients'; did you mean 'client'"),
        ("[[client]]\nname = 'a'", "a client has no key"),
        ("[[client]]\nkey = 'abc'\nname = 'a'", "not a SHA-256"),
        ("[[client]]\nkey = 'abc'\nname = 'a'\npriority = 1", "priority must be true or false"),
        ("[[client]]\nkey = '" + "0" * 64 + "'\nname = 'a'\nsamples = 0", "samples must be at least 1"),
        (2 * ("[[client]]\nkey = '" + "0" * 64 + "'\nname = 'a'\n"), "two clients with the key"),
        ("[[client", "cannot read the roster"),
    ],
)
def test_rosters_are_checked(tmp_path, text, message):
    (tmp_path / "roster.toml").write_text(text)
    with pytest.raises(fa.FedalignError, match=message):
        RosterFile.read(tmp_path / "roster.toml")


def test_a_key_has_one_fingerprint_however_it_is_written(tmp_path, capsys):
    from fedalign.cli import main

    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    openssh = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert fingerprint(openssh) == fingerprint(pem)
    (tmp_path / "k.pub").write_bytes(openssh)
    roster = str(tmp_path / "r.toml")
    add = ["flower", "roster", "add", "--roster", roster]
    assert main([*add, str(tmp_path / "k.pub"), "--name", "site-3", "--priority"]) == 0
    assert RosterFile.read(Path(roster)).entries == (Entry(fingerprint(pem), "site-3", True),)
    assert "site-3" in capsys.readouterr().out
    (tmp_path / "bad.pub").write_text("hello")
    assert main([*add, str(tmp_path / "bad.pub")]) == 2
    assert "not a public key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "the setting model is missing"),
        ({"model": "a:b", "data": "c"}, "data must be package.module:function"),
        ({"model": "a:b", "data": "c:d", "round": 3}, "unknown setting 'round'; did you mean 'rounds'"),
        ({"model": "a:b", "data": "c:d", "rounds": "many"}, "rounds must be a whole number"),
        ({"model": "a:b", "data": "c:d", "rule": "align"}, "rule is 'align'; did you mean 'fedalign'"),
        ({"model": "a:b", "data": "c:d", "quorum": 0.0}, "quorum must be above 0"),
        ({"model": "a:b", "data": "c:d", "lr": -1.0}, "lr"),
    ],
)
def test_settings_are_checked(config, message):
    with pytest.raises(fa.FedalignError, match=message):
        Settings.read(config)


def test_functions_are_found_or_it_is_said():
    assert function("in_process:model") is model
    for bad, message in (
        ("nowhere.at_all:f", "there is no module 'nowhere'"),
        (f"{__name__}:f", "has no 'f'"),
        ("in_process:DATA", "not a function"),
    ):
        with pytest.raises(fa.FedalignError, match=message):
            function(bad)


def test_a_folder_that_holds_a_run_is_not_overwritten(federation, tmp_path):
    _, server = federation(rule="all", rounds=1)
    server().run()
    with pytest.raises(fa.FedalignError, match="already holds a run"):
        server()
    _, other = federation(rule="all", rounds=1, resume=str(tmp_path / "out"), lr=0.5)
    with pytest.raises(fa.FedalignError, match=r"other settings: lr was 0\.1, is 0\.5"):
        other()
    # A setting that the run's version didn't have counts as its default.
    config = tmp_path / "out" / "config.toml"
    config.write_text("".join(re.findall("^(?!cosine).*\n", config.read_text(), re.M)))
    federation(rule="all", rounds=1, resume=str(tmp_path / "out"))[1]()


def test_a_new_app_is_what_flower_wants(tmp_path):
    from flwr.cli.config_utils import load_and_validate

    files = create(tmp_path / "my-federation")
    assert tmp_path / "my-federation" / "my_federation" / "task.py" in files
    config, warnings = load_and_validate(tmp_path / "my-federation" / "pyproject.toml")
    assert warnings == []
    settings = Settings.read(config["tool"]["flwr"]["app"]["config"])
    new = ("aggregator", "client_steps", "server_steps", "optimizer", "loss", "trackers", "trust")
    assert {name: getattr(settings, name) for name in new} == {name: getattr(Settings, name) for name in new}
    with pytest.raises(fa.FedalignError, match="not empty"):
        create(tmp_path / "my-federation")
    with pytest.raises(fa.FedalignError, match="letters, digits"):
        create(tmp_path / "1st")


#: The settings of an app that `fedalign flower new` made in version 0.1.
OLD_APP = """
model = "in_process:model"
data = "in_process:data"
rule = "auto"
epsilon = 0.2
cosine = -0.1
fallback = true
rounds = 10
warmup = 0.1
lr = 0.1
epochs = 5
batch-size = 50
seed = 0
roster = "roster.toml"
out = ""
resume = ""
timeout = 600.0
wait = 120.0
quorum = 1.0
repeats = 3
longest = 10.0
free-cap = 1.0
"""
NEW_SETTINGS = {  # since version 0.1
    "loss", "optimizer", "aggregator", "client_steps", "server_steps", "trackers", "free_total", "trust"
}  # fmt: skip


def test_an_app_of_the_first_version_still_reads(federation, tmp_path):
    config = tomllib.loads(OLD_APP)
    settings = Settings.read(config)
    assert {key: getattr(settings, key.replace("-", "_")) for key in config} == config
    assert settings.make_rule() == fa.Verified(fa.AutoAlign(match_on="heldout"), cosine=-0.1)  # as the app says
    assert Settings.read({**config, "trust": "report"}).make_rule() == fa.AutoAlign(match_on="heldout")
    assert settings.make_local() == fa.LocalSGD(lr=0.1, epochs=5, batch_size=50)
    recipe = settings.recipe
    assert isinstance(recipe.aggregator, fa.WeightedMean)
    assert recipe.server_steps == (fa.LengthBound(10.0),)
    assert (recipe.client_steps, settings.make_trackers()) == ((), [])


def as_first_version(folder):
    """Remove from a run's config.toml the settings that version 0.1 did not have."""
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config.keys() > NEW_SETTINGS
    kept = {key: value for key, value in config.items() if key not in NEW_SETTINGS}
    (folder / "config.toml").write_text(tomli_w.dumps(kept))


def test_settings_that_an_old_run_lacks_have_their_defaults_on_a_resume(federation, tmp_path):
    _, server = federation(rule="all", out=str(tmp_path / "whole"))
    server().run()
    _, server = federation(rule="all")
    server()  # nothing but config.toml
    as_first_version(tmp_path / "out")
    _, other = federation(rule="all", resume=str(tmp_path / "out"), aggregator="median")
    with pytest.raises(fa.FedalignError, match=r"other settings: aggregator was 'mean', is 'median'"):
        other()
    federation(rule="all", resume=str(tmp_path / "out"))[1]().run()
    assert history(tmp_path) == history(tmp_path, "whole")


@pytest.mark.parametrize("rule", ["all", "auto", "auto(credit=true)"])  # 0.1's `auto` had another fallback
def test_a_checkpoint_of_the_first_version_is_refused(federation, tmp_path, rule):
    _, server = federation(rule=rule, rounds=2)
    server().run()
    as_first_version(tmp_path / "out")
    checkpoint = tmp_path / "out" / "checkpoint.safetensors"
    save_file({"state": torch.zeros(610)}, checkpoint, {"rounds": "1", "offset": "0", "log": "e3b0", "state": "5feb"})
    _, again = federation(rule=rule, rounds=2, resume=str(tmp_path / "out"))
    with pytest.raises(
        fa.FedalignError, match=r"checkpoint.safetensors was written by fedalign 0\.1, .*start it again"
    ):
        again()
    assert len(history(tmp_path)) == 2  # nothing was cut off


def test_trackers_may_change_on_a_resume(federation, tmp_path):
    _, server = federation(rule="all", rounds=1)
    server().run()
    federation(rule="all", rounds=1, resume=str(tmp_path / "out"), trackers="fedalign:Callback")[1]().run()


def test_what_leaves_a_client(federation):
    grid, server = federation(rule="fedalign", rounds=2)
    seen = []
    for k in range(6):
        grid.tamper[k] = lambda reply, message: seen.append(reply.content) or reply
    server().run()
    keys = {(name, key) for content in seen for name, record in content.items() for key in record}
    allowed = {("model", "flat"), ("declined", "reason"), ("data", "fingerprint")}
    allowed |= {("samples", split) for split in ("train", "heldout", "test")}
    for name in ("own", "train-0", "heldout-0", "test-0"):
        allowed |= {("measures", f"{name}.{what}") for what in ("loss", "accuracy", "samples")}
    assert keys <= allowed
    texts = [r for c in seen for r in c.values() if isinstance(r, ConfigRecord)]
    assert all(set(r) == {"reason"} or re.fullmatch("[0-9a-f]{16}", r["fingerprint"]) for r in texts)
