"""What a run is about cannot change unnoticed: its model, its clients, their roles and data."""

import json
import os
from pathlib import Path

import in_process
import pytest
import torch
from flwr.app import Error, Message
from in_process import history, weights

import fedalign as fa
from fedalign.flower.audit import read
from fedalign.flower.members import Members
from fedalign.flower.roster_file import Entry, RosterFile, fingerprint
from fedalign.monitoring.prometheus import exposition
from fedalign.monitoring.status import read_status

federation, keys = in_process.federation, in_process.keys
SHAPE = {"out": 10, "layer": torch.nn.Identity}


def model():
    return torch.nn.Sequential(torch.nn.Linear(60, SHAPE["out"]), SHAPE["layer"]())


def site(keys, k, **changes):
    return Entry(fingerprint(keys[k]), f"site-{k}", **{"priority": k < 2, **changes})


def events(tmp_path, *names, out="out"):
    return [(e["event"], e["round"], e["client"]) for e in read(tmp_path / out) if e["event"] in names]


def after_round(server, edits):
    """Run a server; after the rounds that ``edits`` names, call what it says."""
    made = server()
    keep = made._keep

    def kept(done, seconds):
        keep(done, seconds)
        edits.get(done.record.round, lambda: None)()

    made._keep = kept
    made.run()


@pytest.fixture
def edit(tmp_path, keys):
    """Give a function that makes an edit of the roster: clients by number, with changes."""

    def make(*clients, unknown="refuse", **changed):
        entries = tuple(site(keys, k, **changed.get(f"site_{k}", {})) for k in clients)
        return lambda: RosterFile(entries, unknown).write(tmp_path / "roster.toml")

    return make


NODES = {k: {"partition-id": min(k, 5)} for k in range(7)}
ROSTER_EVENTS = ("client_added", "client_removed", "client_joined", "role_changed", "roster_edited", "roster_damaged")


SCAFFOLD = {
    "local.kind": "sgd", "local.lr": 0.1, "local.epochs": 2, "local.scaffold": True, "epochs": None, "batch_size": None
}  # fmt: skip


@pytest.mark.parametrize("settings", [{"trust": "report"}, {"trust": "verify"}, SCAFFOLD])
def test_edits_of_the_roster_take_effect_between_rounds(federation, tmp_path, edit, settings):
    _, server = federation(nodes=NODES, rule="all", warmup=0.0, rounds=6, **settings)
    edits = {
        0: edit(0, 1, 2, 3, 4, 5, 6),
        1: edit(0, 1, 2, 3, 4, 5, 6, site_2={"priority": True}),
        2: edit(0, 1, 2, 3, 4, 6, site_2={"priority": True}, site_3={"samples": 7}),
        4: edit(1, 2, 3, 4, 6, site_2={"priority": True}),
    }
    after_round(server, edits)
    rounds = history(tmp_path)
    assert [len(r.clients) for r in rounds] == [6, 7, 7, 7, 7, 7]
    assert rounds[1].clients[6].decision in ("admitted", "refused")
    assert [r.clients[2].priority for r in rounds] == [False] * 2 + [True] * 4
    assert rounds[2].clients[2].decision == "trained"
    assert (rounds[3].clients[5].decision, rounds[3].clients[5].reason) == ("absent", "removed from the roster")
    assert rounds[5].clients[0].decision == "absent"  # a priority client whose quorum is not missed any more
    assert not rounds[5].clients[0].priority
    assert events(tmp_path, *ROSTER_EVENTS) == [
        ("client_added", 1, "site-6"), ("role_changed", 2, "site-2"), ("roster_edited", 3, "site-3"),
        ("client_removed", 3, "site-5"), ("roster_edited", 5, "site-3"), ("client_removed", 5, "site-0"),
    ]  # fmt: skip
    assert (tmp_path / "out" / "report.html").exists()


def test_a_damaged_edit_changes_nothing(federation, tmp_path, edit, keys):
    _, server = federation(rule="all", warmup=0.0)
    path = tmp_path / "roster.toml"
    edits = {
        0: lambda: path.write_text("[[client]\nkey ="),
        1: edit(2, 3, 4, 5),  # nobody is a priority client
        2: path.unlink,
        3: edit(0, 1, 2, 3, 4),
    }
    after_round(server, edits)
    rounds = history(tmp_path)
    assert [r.clients[5].decision for r in rounds] == ["admitted"] * 4 + ["absent"]
    assert events(tmp_path, *ROSTER_EVENTS) == [
        *(("roster_damaged", round, None) for round in (1, 2, 3)), ("client_removed", 4, "site-5")
    ]  # fmt: skip


def test_a_client_with_a_new_key_is_another_client(federation, tmp_path, keys):
    _, server = federation(nodes=NODES, rule="all", warmup=0.0, rounds=2)
    renewed = (*(site(keys, k) for k in range(5)), Entry(fingerprint(keys[6]), "site-5"))
    after_round(server, {0: lambda: RosterFile(renewed).write(tmp_path / "roster.toml")})
    old, new = history(tmp_path)[1].clients[5:]
    assert (old.decision, new.decision) == ("absent", "admitted")
    assert (new.name, old.name) == ("site-5", f"site-5 ({fingerprint(keys[5])[:8]})")


def test_strangers_whose_keys_begin_alike_have_names_of_their_own():
    twins = [Entry(f"{'ab' * 4}{k:056x}", f"node-{'ab' * 4}") for k in range(3)]
    members = Members([Entry("0" * 64, "site-0", True), *twins], free_cap=1.0)
    start = twins[0].name
    assert members.roster().names == ("site-0", start, f"{start} (abababab)", f"{start} ({twins[2].key})")
    assert [members.name(k) for k in range(4)] == list(members.roster().names)
    members.edit([Entry("0" * 64, "site-0", True), *twins[1:]])
    assert members.roster().names == ("site-0", f"{start} ({twins[0].key})", start, f"{start} (abababab)")


def test_a_stranger_with_a_name_of_the_roster_does_not_end_the_run(federation, tmp_path, keys):
    _, server = federation(nodes=NODES, rule="all", warmup=0.0, rounds=2)
    name = f"node-{fingerprint(keys[6])[:8]}"
    entries = [*(site(keys, k) for k in range(5)), Entry(fingerprint(keys[5]), name)]
    RosterFile(tuple(entries), "free").write(tmp_path / "roster.toml")
    server().run()
    named, stranger = history(tmp_path)[1].clients[5:]
    assert (named.name, stranger.name) == (name, f"{name} ({fingerprint(keys[6])[:8]})")
    assert (named.decision, stranger.decision) == ("admitted", "admitted")


def test_a_removed_client_and_its_successor_are_two_series(federation, tmp_path, keys):
    _, server = federation(nodes=NODES, rule="all", warmup=0.0, rounds=2)
    renewed = (*(site(keys, k) for k in range(5)), Entry(fingerprint(keys[6]), "site-5"))
    after_round(server, {0: lambda: RosterFile(renewed).write(tmp_path / "roster.toml")})
    status = read_status(tmp_path / "out")
    text = exposition(status, history(tmp_path), status.heartbeat).decode()
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    assert len({client.name for client in status.clients}) == 7


@pytest.mark.parametrize(
    ("text", "said"), [("a = ", "cannot read"), ("", "is empty"), ("a = " + "[" * 5000, "cannot read")]
)
def test_damaged_settings_of_a_run_are_told(federation, tmp_path, text, said):
    federation(rule="all", rounds=1)[1]().run()
    (tmp_path / "out" / "config.toml").write_text(text)
    with pytest.raises(fa.FedalignError, match=said):
        federation(rule="all", rounds=1, resume=str(tmp_path / "out"))[1]().run()


def test_strangers_join_while_a_run_goes_on(federation, tmp_path, edit, keys):
    grid, server = federation(rule="all", warmup=0.0)
    edit(*range(6), unknown="free")()

    def connect():
        grid.nodes[6] = NODES[6]

    after_round(server, {0: connect, 2: edit(*range(6), unknown="refuse")})
    name = f"node-{fingerprint(keys[6])[:8]}"
    decisions = [[c.decision for c in r.clients if c.name == name] for r in history(tmp_path)]
    assert decisions == [[], ["admitted"], ["admitted"], ["absent"], ["absent"]]
    assert events(tmp_path, *ROSTER_EVENTS) == [("client_joined", 1, name), ("roster_edited", 3, None)]


def test_clients_keep_their_numbers_on_resume(federation, tmp_path, edit):
    settings = {"rule": "all", "warmup": 0.0, "nodes": NODES}
    after_round(federation(**settings, rounds=2)[1], {0: edit(6, 5, 4, 1, 0)})  # without 2 and 3
    edit(0, 1, 2, 4, 5, 6, site_4={"priority": True})()
    federation(**settings, rounds=3, resume=str(tmp_path / "out"))[1]().run()
    last = history(tmp_path)[-1].clients
    assert [c.name for c in last] == [f"site-{k}" for k in range(7)]
    assert [c.decision for c in last] == [
        "trained", "trained", "admitted", "absent", "trained", "admitted", "admitted"
    ]  # fmt: skip
    assert events(tmp_path, "run_resumed", *ROSTER_EVENTS)[-3:] == [
        ("run_resumed", 2, None), ("client_added", 2, "site-2"), ("role_changed", 2, "site-4")
    ]  # fmt: skip


def test_a_jump_of_a_sample_count_is_noticed_and_capped(federation, tmp_path):
    grid, server = federation(rule="all", warmup=0.0, rounds=4, refresh=2)
    factors = {1: 3, 4: 1.5, 5: 100}

    def grow(k):
        def tamper(reply, message):
            if message.metadata.message_type == "query.hello" and len(history(tmp_path)) >= 2:
                samples = reply.content["samples"]
                samples["train"] = int(factors[k] * samples["train"])
            return reply

        return tamper

    grid.tamper = {k: grow(k) for k in factors}
    server().run()
    found = {e["client"]: e for e in read(tmp_path / "out") if e["event"].startswith("samples_")}
    first = {client: e["details"]["was"] for client, e in found.items()}
    assert {client: (e["event"], e["details"]["now"]) for client, e in found.items()} == {
        "site-1": ("samples_jumped", 3 * first["site-1"]),
        "site-4": ("samples_changed", int(1.5 * first["site-4"])),
        "site-5": ("samples_jumped", 100 * first["site-5"]),
    }
    assert found["site-5"]["details"]["counted"] == 2 * first["site-5"]
    assert found["site-1"]["details"]["counted"] == 3 * first["site-1"]
    before, after = (history(tmp_path)[t].clients for t in (1, 2))
    ratio = (after[5].weight / after[3].weight) / (before[5].weight / before[3].weight)
    assert ratio == pytest.approx(2.0)


def test_other_data_is_noticed_on_resume(federation, tmp_path):
    nodes = {k: {"partition-id": k} for k in range(6)}
    federation(nodes=nodes, rounds=1)[1]().run()
    nodes[3] = {"partition-id": 4}
    federation(nodes=nodes, rounds=2, resume=str(tmp_path / "out"))[1]().run()
    assert events(tmp_path, "data_changed") == [("data_changed", 1, "site-3")]


@pytest.fixture
def changed_model(monkeypatch):
    """Give a function that changes what the app's model function makes."""
    return lambda **changes: [monkeypatch.setitem(SHAPE, name, value) for name, value in changes.items()]


def test_another_model_is_told_on_resume(federation, tmp_path, changed_model):
    settings = {"model": f"{__name__}:model"}
    federation(**settings, rounds=1)[1]().run()
    changed_model(out=12)
    _, server = federation(**settings, rounds=2, resume=str(tmp_path / "out"))
    with pytest.raises(fa.FedalignError, match=r"another model: 0\.weight was float32 10×60, is float32 12×60"):
        server()
    (tmp_path / "out" / "identity.json").unlink()  # as of a run of an earlier version
    with pytest.raises(fa.FedalignError, match="was run with another model: it had 610 numbers, this one has 732"):
        server()
    changed_model(out=10, layer=torch.nn.ReLU)
    server().run()
    changed_model(layer=torch.nn.Tanh)
    federation(**settings, rounds=3, resume=str(tmp_path / "out"))[1]().run()
    assert events(tmp_path, "model_changed") == [("model_changed", 2, None)]


def test_a_damaged_identity_is_told(federation, tmp_path):
    federation(rounds=1)[1]().run()
    (tmp_path / "out" / "identity.json").write_text('{"model": 3}')
    with pytest.raises(fa.FedalignError, match=r"identity\.json cannot be read"):
        federation(rounds=1, resume=str(tmp_path / "out"))[1]()


def test_a_run_may_be_extended_and_not_shortened(federation, tmp_path):
    federation(rule="all", rounds=4, warmup=1, out=str(tmp_path / "whole"))[1]().run()
    federation(rule="all", rounds=2, warmup=1)[1]().run()
    federation(rule="all", rounds=4, warmup=1, resume=str(tmp_path / "out"))[1]().run()
    assert history(tmp_path) == history(tmp_path, "whole")
    for key, value in weights(tmp_path, "whole").items():
        assert torch.equal(weights(tmp_path)[key], value)
    changed = [e["details"] for e in read(tmp_path / "out") if e["event"] == "settings_changed"]
    assert changed == [{"rounds": [2, 4]}]
    with pytest.raises(fa.FedalignError, match="rounds was 4, is 3"):
        federation(rule="all", rounds=3, warmup=1, resume=str(tmp_path / "out"))[1]()


def test_an_extended_run_keeps_its_warmup(federation, tmp_path):
    federation(rule="all", rounds=2, warmup=0.5)[1]().run()
    federation(rule="all", rounds=8, warmup=0.5, resume=str(tmp_path / "out"))[1]().run()
    assert [r.warmup for r in history(tmp_path)] == [True] + [False] * 7


def test_errors_on_nodes_reach_the_record(federation, tmp_path):
    grid, server = federation(rule="all", rounds=1, warmup=0.0, quorum=0.3)

    def fail(*kinds):
        return lambda reply, message: (
            Message(Error(2, "Traceback\nOSError: disk \x1b[2Jfull"), reply_to=message)
            if message.metadata.message_type in kinds
            else reply
        )

    grid.tamper = {1: fail("evaluate"), 3: fail("train"), 4: fail("query.hello")}
    server().run()
    (record,) = history(tmp_path)
    why = "error 2: OSError: disk ?[2Jfull"
    assert [(c.decision, c.reason) for c in (record.clients[k] for k in (1, 3, 4))] == [
        ("lost", f"did not answer the evaluation: {why}"), ("lost", why), ("absent", why)
    ]  # fmt: skip


def test_rounds_checkpoints_and_the_identity_are_on_disk(federation, tmp_path, monkeypatch):
    synced, real = set(), os.fsync

    def fsync(descriptor):
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    federation(rounds=2)[1]().run()
    assert synced >= {"rounds.jsonl", "checkpoint.new", "identity.json.new", "config.toml.new", "audit.jsonl", "out"}
    identity = json.loads((tmp_path / "out" / "identity.json").read_text())
    assert identity["model"]["tensors"] == {"weight": "float32 10×60", "bias": "float32 10"}
    assert len(identity["clients"]) == len(identity["data"]) == 6
