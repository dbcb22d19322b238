"""Over Flower, nodes make personal models for their owners; at most the accuracies leave them."""

from __future__ import annotations

import json

import in_process
import pytest
import torch
from flwr.app import MetricRecord
from in_process import DATA
from safetensors.torch import load_file

import fedalign as fa
from fedalign.flower.audit import read
from fedalign.flower.settings import Settings

federation, keys = in_process.federation, in_process.keys
METHODS = "refine(epochs=3); ditto(epochs=3, mu=0.5)"


def nodes_of(tmp_path, keeping=(), reporting=()):
    return {
        k: {
            "partition-id": k,
            **({"keep-model": str(tmp_path / f"{k}.safetensors"), "log": str(tmp_path / f"{k}.jsonl")} if k in keeping
               else {}),
            **({"report-personal": True} if k in reporting else {}),
        }
        for k in range(6)
    }  # fmt: skip


def test_models_stay_on_the_nodes_and_equal_those_of_a_simulation(federation, tmp_path):
    nodes = nodes_of(tmp_path, keeping={0, 3}, reporting={3, 4})
    grid, server = federation(nodes=nodes, rule="all", rounds=2, warmup=0.0, deliver="all", personal=METHODS)
    server().run()
    asked = [m for m in grid.sent if m.metadata.message_type == "query.personal"]
    assert {m.metadata.dst_node_id - 100 for m in asked} == {0, 3, 4}  # nobody else has a use for it
    local = fa.LocalSGD(lr=0.1, epochs=2, batch_size=20)
    expected = fa.simulate(
        DATA.federation(seed=0), in_process.model, rule="all", rounds=2, warmup=0.0, local=local, personal=METHODS,
        device="cpu", free_cap=1.0,
    )  # fmt: skip
    for k in (0, 3):
        for name in ("refine", "ditto"):
            tensors = load_file(tmp_path / f"{k}-{name}.safetensors")
            model = expected.personal[name][k].model.state_dict()
            assert all(torch.allclose(tensors[key], model[key], atol=1e-5) for key in model)
    rows = json.loads((tmp_path / "out" / "clients.json").read_text())
    told = {row["id"]: row["personal"] for row in rows}
    assert told[0] == told[1] == {}  # their owners let nothing be reported
    for k in (3, 4):
        assert told[k]["ditto"]["test_accuracy"] == pytest.approx(expected.personal["ditto"][k].test.accuracy, abs=0.02)
        assert told[k]["ditto"]["test_loss"] is None
        assert told[k]["ditto"]["passes"] is None
    events = [e["client"] for e in read(tmp_path / "out") if e["event"] == "personal_models_made"]
    assert sorted(events) == ["site-0", "site-3", "site-4"]
    lines = [json.loads(line) for line in (tmp_path / "3.jsonl").read_text().splitlines()]
    (noted,) = [line for line in lines if line.get("personal")]
    assert set(noted["personal"]) == {"refine", "ditto"}


def test_the_reply_holds_accuracies_alone(federation, tmp_path):
    replies = {}

    def watch(reply, message):
        if message.metadata.message_type == "query.personal":
            replies[message.metadata.dst_node_id - 100] = reply.content
        return reply

    grid, server = federation(
        nodes=nodes_of(tmp_path, keeping={0}, reporting={2}), rule="all", rounds=1, warmup=0.0, deliver="all",
        personal=METHODS,
    )  # fmt: skip
    grid.tamper = dict.fromkeys(range(6), watch)
    server().run()
    assert dict(replies[0]) == {}
    assert list(replies[2]) == ["personal"]
    assert set(replies[2]["personal"]) == {"refine", "ditto"}


def test_what_a_stranger_reports_is_checked(federation, tmp_path):
    grid, server = federation(
        nodes=nodes_of(tmp_path, reporting={2, 3, 4}), rule="all", rounds=1, warmup=0.0, deliver="all",
        personal="refine(epochs=1)",
    )  # fmt: skip

    def lie(record):
        def tampered(reply, message):
            if message.metadata.message_type == "query.personal":
                reply.content.update(record)
            return reply

        return tampered

    grid.tamper = {
        2: lie({"personal": MetricRecord({"refine": 7.0, "other": 0.5})}),
        3: lie({"model": MetricRecord({"weights": [0.0] * 10})}),
    }
    server().run()
    rows = {row["id"]: row for row in json.loads((tmp_path / "out" / "clients.json").read_text())}
    assert rows[2]["personal"] == rows[3]["personal"] == {}
    assert set(rows[4]["personal"]) == {"refine"}
    failed = [e["client"] for e in read(tmp_path / "out") if e["event"] == "personal_models_failed"]
    assert failed == ["site-3"]


def test_who_may_not_have_the_model_is_not_asked(federation, tmp_path):
    nodes = nodes_of(tmp_path, reporting=set(range(6)))
    grid, server = federation(nodes=nodes, rule="priority", rounds=1, personal="refine(epochs=1)", deliver="priority")
    server().run()
    asked = {m.metadata.dst_node_id - 100 for m in grid.sent if m.metadata.message_type == "query.personal"}
    assert asked == {0, 1}


def test_methods_that_send_models_to_other_clients_are_refused():
    given = {"model": "in_process:model", "data": "in_process:data", "personal": "fedfomo"}
    with pytest.raises(fa.FedalignError, match="fedfomo sends clients' models to other clients"):
        Settings.read(given)
