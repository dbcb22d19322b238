"""A client's own limits hold for every rule and role, before anything is measured, and are recorded with a reason."""

import json
import os
import sys

import in_process
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from in_process import history

import fedalign as fa
from fedalign.flower import start_node
from fedalign.flower.client_app import app
from fedalign.flower.gate import foreign_code
from fedalign.flower.node_config import node_config
from fedalign.flower.policy import Policy
from fedalign.rules.rule import Broadcast, Measure

federation, keys = in_process.federation, in_process.keys
HASH = "a" * 64
OWN, TOLD = Measure(1.4, 0.5, 10), Broadcast(3, 1.0, 0.6, 0.5)


def nodes_with(config, clients):
    return {k: {"partition-id": k, **(config if k in clients else {})} for k in range(6)}


@pytest.mark.parametrize("priority", [True, False])
def test_limits_hold_for_every_role(priority):
    rule = fa.Align(0.5)
    assert Policy().refuses(rule, OWN, TOLD, priority) is None
    assert "not within 0.1" in Policy(max_epsilon=0.1).refuses(rule, OWN, TOLD, priority)
    assert Policy(max_epsilon=0.45).refuses(rule, OWN, TOLD, priority) is None
    assert Policy(max_loss=1.0).refuses(rule, OWN, TOLD, priority) == "loss 1.4 is above its limit 1"
    assert Policy(opt_out=True).refuses(rule, OWN, TOLD, priority) == "opted out"
    assert Policy(max_loss=1.0).refuses(rule, Measure(float("nan"), 0.5, 10), TOLD, priority) is not None


@pytest.mark.parametrize("rule", [fa.Everyone(), fa.Align(5.0), fa.AutoAlign(), fa.GradientAlign()])
def test_max_epsilon_holds_for_every_rule(rule):
    told = Broadcast(3, 1.0, 0.6, None if isinstance(rule, fa.Everyone | fa.GradientAlign) else 5.0)
    assert Policy(max_epsilon=0.1).refuses(rule, OWN, told, False) == "loss 1.4, not within 0.1 of 1"
    assert Policy(max_epsilon=0.45).refuses(rule, OWN, told, False) is None
    endless = Broadcast(3, float("inf"), 0.6, told.epsilon)  # a server may broadcast anything
    assert Policy(max_epsilon=0.45).refuses(rule, OWN, endless, False) is not None


def test_rounds_a_day(tmp_path):
    rule = fa.Align(0.5)
    daily = Policy.read({"rounds-a-day": 2, "log": str(tmp_path / "log.jsonl"), "partition-id": 1})
    for _ in range(2):
        assert daily.refuses(rule, OWN, TOLD, False) is None
        daily.note(OWN, TOLD, None)
    assert daily.refuses(rule, OWN, TOLD, False) == "2 rounds a day are enough"
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["loss"], line["trained"]) for line in lines] == [(1.4, True)] * 2
    # A priority client may train two models in a round, which count once; in a second run the round is another.
    daily = Policy.read({"rounds-a-day": 2, "log": str(tmp_path / "own.jsonl")})
    for run in (7, 7, 8, 8):
        assert daily.refuses(rule, OWN, TOLD, True, run) is None
        daily.note(OWN, TOLD, None, run)
    assert daily.refuses(rule, OWN, TOLD, True, 8) == "2 rounds a day are enough"
    assert daily.refuses(rule, OWN, TOLD, True, 9, models=99) == "2 rounds a day are enough"  # in one message
    with (tmp_path / "own.jsonl").open("a") as file:
        file.write("{half a li\n")
    with pytest.raises(fa.FedalignError, match="has a damaged line, number 5"):
        daily.refuses(rule, OWN, TOLD, True, 8)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rounds-a-day": 2}, "needs a log"),
        ({"max-loss": "much"}, "max-loss must be a number"),
        ({"max-epsilon": float("nan")}, "max-epsilon must be a number, 0 or more, not nan"),
        ({"opt-out": "yes"}, "opt-out must be true or false"),
        ({"max-epsilom": 0.5}, "unknown key 'max-epsilom'; did you mean 'max-epsilon'"),
        ({"opt_out": True}, "unknown key 'opt_out'; did you mean 'opt-out'"),
        ({"rounds-per-day": 3}, "unknown key 'rounds-per-day'; did you mean 'rounds-a-day'"),
        ({"policy.opt-out": True}, "unknown key 'policy.opt-out'; did you mean 'opt-out'"),
        ({"site.limits.maxLoss": 2.0}, "unknown key 'site.limits.maxLoss'; did you mean 'max-loss'"),
        ({"allowed-apps": HASH}, "unknown key 'allowed-apps', which looks like a limit; the limits are opt-out, "),
        ({"trusted.apps2": HASH}, "did you mean 'apps'"),
        ({"eps": 0.1}, "unknown key 'eps', which looks like a limit"),
        ({"optin": False}, "unknown key 'optin', which looks like a limit"),
        ({"no-train": True}, "unknown key 'no-train', which looks like a limit"),
        ({"lossLimit": 2.0}, "unknown key 'lossLimit', which looks like a limit.* may begin with data-"),
        ({"daily_rounds": 3}, "unknown key 'daily_rounds', which looks like a limit"),
        ({"apps": "abc"}, "apps must be SHA-256 hashes, .* not 'abc'"),
        ({"apps": ""}, "apps name no app"),
        ({"apps": " , "}, "apps name no app"),
    ],
)
def test_wrong_limits_are_refused(config, said):
    with pytest.raises(fa.FedalignError, match=said):
        Policy.read({"partition-id": 1, **config})


def test_keys_of_the_data_function_are_its_own():
    config = {"partition-id": 1, "priority": True, "samples": 3.0, "data-max-loss": 3, "site": "a"}
    words = ("num-partitions", "path", "folder", "name", "csv", "files.images", "data-opt.out", "mapping", "maxima")
    assert Policy.read(config | dict.fromkeys(words, "x")) == Policy()


@pytest.mark.parametrize("second", ["--node-config=partition-id=1", "--node-conf=partition-id=1"])
def test_a_second_config_does_not_replace_the_limits_of_the_first(second):
    with pytest.raises(fa.FedalignError, match="--node-config is given twice"):
        node_config(["--insecure", "--node-config", "opt-out=true", second])


def test_a_table_of_a_toml_file_does_not_hide_a_limit(tmp_path):
    (tmp_path / "node.toml").write_text("partition-id = 1\n[policy]\nopt-out = true\n")
    with pytest.raises(fa.FedalignError, match=r"unknown key 'policy\.opt-out'; did you mean 'opt-out'"):
        Policy.read(node_config(["--node-config", str(tmp_path / "node.toml")]))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("partition-id=1 cache-mb=5", "fedalign: no limits"),
        (
            f'opt-out=true max-epsilon=0.5 max-loss=2.0 rounds-a-day=20 log="x" apps="{"a" * 64} {"b" * 64}"',
            "fedalign: limits in force: opt-out=true, max-epsilon=0.5, max-loss=2, rounds-a-day=20, apps (2)",
        ),
    ],
)
def test_a_node_says_at_the_start_which_limits_are_in_force(tmp_path, monkeypatch, capfd, config, said):
    started = []
    monkeypatch.setattr("os.execv", lambda path, words: started.append(words))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    start_node.node(["--insecure", "--node-config", config])
    assert started[0][-1] == config
    assert capfd.readouterr().err.splitlines() == [said]


def test_apps_are_checked_by_their_hash():
    policy = Policy(apps=f"{'a' * 64}, {'b' * 64}")
    assert policy.declines("b" * 64) is None
    assert policy.declines("c" * 64) == f"this node does not allow the app {'c' * 64}"
    assert "fedalign flower node" in policy.declines()  # FedALIGN's app cannot check itself
    assert Policy().declines("c" * 64) is None


def test_all_does_not_bypass_max_epsilon(federation, tmp_path):
    _, server = federation(nodes=nodes_with({"max-epsilon": 0.0}, {2, 3}), rule="all", rounds=3)
    server().run()
    for record in history(tmp_path):
        for k in (2, 3):
            client = record.clients[k]
            assert client.decision == ("declined" if client.loss > record.global_loss else "admitted")
            if client.decision == "declined":
                assert client.reason.endswith(f"not within 0 of {record.global_loss:.4g}")
        assert {record.clients[k].decision for k in (4, 5)} == {"admitted"}
    assert any(record.clients[k].decision == "declined" for record in history(tmp_path) for k in (2, 3))


@pytest.mark.parametrize("rule", ["all", "fedalign", "auto"])
def test_an_opted_out_node_reports_nothing(federation, tmp_path, rule):
    grid, server = federation(nodes=nodes_with({"opt-out": True, "log": str(tmp_path / "log")}, {3}), rule=rule)
    seen = []
    grid.tamper[3] = lambda reply, message: seen.append(reply) or reply
    server().run()
    for record in history(tmp_path)[1:]:
        client = record.clients[3]
        assert (client.decision, client.reason, client.loss) == ("declined", "opted out", None)
    assert seen
    assert all(reply.has_error() for reply in seen)
    assert not any("model" in m.content for m in grid.sent if m.metadata.dst_node_id == 103)  # nothing to work on
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {(line["asked"], line["reason"], line["trained"]) for line in lines} == {("query.hello", "opted out", False)}


@pytest.mark.parametrize("kind", ["train", "evaluate", "query.hello"])
def test_an_opted_out_node_does_not_even_load_its_data(kind, monkeypatch):
    for name in ("task", "run", "node"):  # which Flower sets in an app's process
        monkeypatch.setattr(TaskIdentity, f"_{name}_id", 1)
    config = {"model": "in_process:model", "data": "no_such_module:data"}
    context = Context(1, 1, {"opt-out": True}, RecordDict(), config)
    message = Message(RecordDict(), 1, kind)
    message.metadata.__dict__["_message_id"] = "message"
    reply = app(message, context)
    assert reply.has_error()
    assert reply.error.reason == "opted out"


@pytest.mark.parametrize("key", ["callbacks", "trackers", "track"])
def test_code_for_the_server_is_not_imported_on_a_node(key, tmp_path, monkeypatch):
    for name in ("task", "run", "node"):  # which Flower sets in an app's process
        monkeypatch.setattr(TaskIdentity, f"_{name}_id", 1)
    (tmp_path / "planted.py").write_text("class Callback:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = {"model": "in_process:model", "data": "in_process:data", key: "planted:Callback"}
    assert foreign_code(config, {"data": config["data"], "model": config["model"]}) is None  # the gate lets it pass
    message = Message(RecordDict(), 1, "query.hello")
    message.metadata.__dict__["_message_id"] = "message"
    reply = app(message, Context(1, 1, {"partition-id": 3}, RecordDict(), config))
    assert "planted" not in sys.modules
    assert reply.content["samples"]["train"] > 0


def test_a_priority_node_keeps_its_limits(federation, tmp_path):
    _, server = federation(nodes=nodes_with({"max-loss": 0.0}, {1}), rule="all", rounds=1, quorum=0.1, warmup=0.0)
    server().run()
    (record,) = history(tmp_path)
    assert record.clients[1].decision == "declined"
    assert record.clients[1].reason.endswith("is above its limit 0")
    assert record.clients[0].decision == "trained"


def test_a_priority_node_that_opted_out_is_missed(federation, tmp_path, caplog):
    _, server = federation(nodes=nodes_with({"opt-out": True}, {1}), rule="all", rounds=1)
    with caplog.at_level("WARNING", "flwr"), pytest.raises(fa.FedalignError, match="not connected: site-1"):
        server().run()
    assert "site-1 is left out for now: opted out" in caplog.text


def test_rounds_a_day_is_asked_before_anything_is_measured(federation, tmp_path):
    config = {"rounds-a-day": 1, "log": str(tmp_path / "log")}
    _, server = federation(nodes=nodes_with(config, {2}), rule="all", rounds=3, warmup=0.0)
    server().run()
    found = [record.clients[2] for record in history(tmp_path)]
    assert [client.decision for client in found] == ["admitted", "declined", "declined"]
    assert found[0].loss is not None
    assert [(client.reason, client.loss) for client in found[1:]] == [("1 rounds a day are enough", None)] * 2
