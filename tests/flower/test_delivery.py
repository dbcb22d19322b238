"""The final model reaches the nodes that may have it and whose owners keep it; a node's owner sees what it did."""

import json

import in_process
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from in_process import history, weights
from safetensors import safe_open
from safetensors.torch import load_file

from fedalign.cli import main
from fedalign.flower.audit import read
from fedalign.flower.gate import foreign_code
from fedalign.flower.node_log import NodeLog
from fedalign.flower.roster_file import RosterFile, fingerprint
from fedalign.flower.wire import KEEP
from fedalign.monitoring.words import printable

federation, keys = in_process.federation, in_process.keys


def keeping(tmp_path, clients, **more):
    """Return the configs of six nodes, of which some keep models."""
    return {
        k: {"partition-id": k, **({"keep-model": str(tmp_path / f"{k}.safetensors")} if k in clients else {}), **more}
        for k in range(6)
    }


def kept(tmp_path):
    return {k for k in range(6) if (tmp_path / f"{k}.safetensors").exists()}


@pytest.mark.parametrize(
    ("deliver", "expected"),
    [("none", set()), ("priority", {0, 1}), ("admitted", {0, 1, 2}), ("all", {0, 1, 2, 4})],
)
def test_who_gets_the_model(federation, tmp_path, deliver, expected):
    nodes = keeping(tmp_path, {0, 1, 2, 4})
    nodes[4]["max-loss"] = 0.0  # it is never admitted
    nodes[3]["opt-out"] = True
    grid, server = federation(nodes=nodes, rule="all", rounds=2, warmup=0.0, deliver=deliver)
    server().run()
    assert kept(tmp_path) == expected
    for k in expected:
        tensors = load_file(tmp_path / f"{k}.safetensors")
        assert all(torch.equal(value, weights(tmp_path)[name]) for name, value in tensors.items())
        with safe_open(tmp_path / f"{k}.safetensors", "pt") as file:
            assert file.metadata() == {"run": "1", "kind": "final"}
    asked = {m.metadata.dst_node_id - 100 for m in grid.sent if m.metadata.message_type == "query.keep"}
    assert asked == expected  # nobody else is sent anything
    events = [e for e in read(tmp_path / "out") if e["event"].startswith("model")]
    assert {e["client"] for e in events if e["event"] == "model_delivered"} == {f"site-{k}" for k in expected}


def test_the_roster_and_a_resume(federation, tmp_path):
    path = tmp_path / "roster.toml"
    text = path.read_text()
    assert main(["flower", "roster", "remove", "site-5", "--roster", str(path)]) == 0
    roster = RosterFile.read(path)
    path.write_text(text.replace('name = "site-0"', 'name = "site-0"\nmodel = false').replace(
        'name = "site-3"', 'name = "site-3"\nmodel = true'))  # fmt: skip
    assert [entry.name for entry in roster.entries] == [f"site-{k}" for k in range(5)]
    nodes = keeping(tmp_path, {0, 1, 3})
    grid, server = federation(nodes=nodes, rule="priority", rounds=1)
    grid.tamper[3] = lambda reply, message: None if message.metadata.message_type == "query.keep" else reply
    server().run()
    assert {c.decision for c in history(tmp_path)[0].clients[2:]} == {"absent"}
    (lost,) = [e for e in read(tmp_path / "out") if e["event"] == "model_not_delivered"]
    assert (lost["client"], lost["details"]["kind"]) == ("site-3", "final")
    (tmp_path / "3.safetensors").unlink()
    (tmp_path / "1.safetensors").unlink()
    federation(nodes=nodes, rule="priority", rounds=1, resume=str(tmp_path / "out"))[1]().run()
    assert kept(tmp_path) == {1, 3}


def test_a_node_s_own_summary(federation, tmp_path, capsys):
    nodes = keeping(tmp_path, {2})
    nodes[2]["log"] = str(tmp_path / "node.jsonl")
    nodes[2]["max-epsilon"] = 0.0
    federation(nodes=nodes, rule="all", rounds=3, warmup=0.0, deliver="all")[1]().run()
    assert main(["flower", "mine", str(tmp_path / "node.jsonl"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    mine = [record.clients[2] for record in history(tmp_path)]
    assert found["asked"]["train"] == 3
    assert found["trained"] == sum(client.decision == "admitted" for client in mine)
    assert sum(found["declined"].values()) == sum(client.decision == "declined" for client in mine)
    assert found["losses"] == [[t, pytest.approx(client.loss)] for t, client in enumerate(mine)]
    assert found["models"] == [str(tmp_path / "2.safetensors")]
    assert main(["flower", "mine", str(tmp_path / "node.jsonl")]) == 0
    said = capsys.readouterr().out
    assert "the final model is in" in said
    assert "declined" in said
    assert main(["flower", "mine", str(tmp_path / "none.jsonl")]) == 2
    assert "there is no log" in capsys.readouterr().err


def test_a_client_that_is_not_in_the_roster_cannot_be_removed(federation, tmp_path, capsys):
    path = str(tmp_path / "roster.toml")
    assert main(["flower", "roster", "remove", "site-9", "--roster", path]) == 2
    assert "has no client 'site-9'; did you mean" in capsys.readouterr().err
    assert len(RosterFile.read(tmp_path / "roster.toml").entries) == 6


def test_a_key_in_the_current_folder_does_not_hide_a_client_of_its_name(federation, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site-4").write_text("-----BEGIN OPENSSH PRIVATE KEY-----")
    assert main(["flower", "roster", "remove", "site-4"]) == 0
    assert len(RosterFile.read(tmp_path / "roster.toml").entries) == 5
    (tmp_path / "mine").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl")
    capsys.readouterr()
    for words in (["remove", "mine"], ["add", "mine"]):
        assert main(["flower", "roster", *words]) == 2
        said = capsys.readouterr().err
        assert "mine: this is not a public key" in said
        assert "PRIVATE" not in said
    assert main(["flower", "roster", "add", "none.pub"]) == 2
    assert "cannot read none.pub: No such file or directory\n" in capsys.readouterr().err


def test_a_client_gets_a_new_key_in_one_step(federation, tmp_path, monkeypatch, keys, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.pub").write_bytes(keys[6])
    assert main(["flower", "roster", "add", "new.pub", "--name", "site-1", "--priority"]) == 2
    assert "another key; --replace gives it the new one" in " ".join(capsys.readouterr().err.split())
    assert main(["flower", "roster", "add", "new.pub", "--name", "site-1", "--priority", "--replace"]) == 0
    entries = RosterFile.read(tmp_path / "roster.toml").entries
    assert sorted(entry.name for entry in entries) == [f"site-{k}" for k in range(6)]
    assert {entry.key for entry in entries if entry.name == "site-1"} == {fingerprint(keys[6])}


@pytest.mark.parametrize("name", ["a\x1b[31mb", "  ", "a\u202eb"])
def test_names_that_a_terminal_would_obey_are_refused(federation, tmp_path, monkeypatch, keys, capsys, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.pub").write_bytes(keys[6])
    assert main(["flower", "roster", "add", "new.pub", "--name", name]) == 2
    assert "a text without control characters" in " ".join(capsys.readouterr().err.split())
    text = (tmp_path / "roster.toml").read_text()
    (tmp_path / "roster.toml").write_text(text.replace('"site-3"', json.dumps(name)))
    assert main(["flower", "roster", "show"]) == 2


def test_a_server_writes_nothing_into_its_owner_s_terminal(tmp_path, capsys):
    hidden = "x:\x1b[2J\x1b[1;31mowned\nfedalign: no limits\u202e"
    reason = foreign_code({"loss": hidden, "\x1b[2Jkey": hidden}, {})
    assert printable(reason) == reason
    NodeLog(tmp_path / "node.jsonl").add(run=1, asked=f"train{hidden}", trained=False, reason=hidden)
    assert main(["flower", "mine", str(tmp_path / "node.jsonl")]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\u202e" not in said
    assert "\nfedalign: no limits" not in said


def test_a_node_keeps_the_final_model_alone(federation, tmp_path):
    _, server = federation(nodes=keeping(tmp_path, {0}), rule="priority", rounds=1, deliver="all")
    made = server()
    made.run()
    answers = made._driver.exchange(
        KEEP, {0: RecordDict({"task": ConfigRecord({"client": 0, "kind": "spam1"})})}, "delivery"
    )
    assert "keeps the final model alone" in answers[0].reason
    assert [path.name for path in tmp_path.glob("0*.safetensors")] == ["0.safetensors"]


def test_the_hash_of_an_app(tmp_path, capsys):
    assert main(["flower", "new", str(tmp_path / "my-app")]) == 0
    capsys.readouterr()
    assert main(["flower", "hash", str(tmp_path / "my-app")]) == 0
    assert len(capsys.readouterr().out.strip()) == 64
    assert main(["flower", "hash", str(tmp_path)]) == 2
    assert "is not a Flower app" in capsys.readouterr().err
