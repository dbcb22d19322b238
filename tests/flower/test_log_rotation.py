"""Logs do not grow without end, and rotating them neither loses what counts nor tears a line."""

import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor

import in_process
import pytest

import fedalign as fa
from fedalign.flower import audit, node_log, server_log
from fedalign.flower.audit import AuditLog
from fedalign.flower.node_log import NodeLog
from fedalign.flower.policy import Policy
from fedalign.monitoring.rotation import files, held, rotate
from fedalign.rules.rule import Broadcast, Measure

federation, keys = in_process.federation, in_process.keys


def test_writers_at_the_same_time_lose_no_line(tmp_path, monkeypatch):
    monkeypatch.setattr(node_log, "LARGEST", 2000)
    path = tmp_path / "node.jsonl"

    def add_lines(first):
        for number in range(first, first + 60):
            NodeLog(path).add(run=1, asked="train", round=number, trained=True)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add_lines, [0, 100, 200, 300]))
    lines = list(NodeLog(path).lines())
    assert sorted(line["round"] for line in lines) == [100 * k + i for k in range(4) for i in range(60)]
    assert len(files(path)) > 5
    assert all(file.stat().st_size < 2200 for file in files(path))


def test_old_files_go_and_young_ones_stay(tmp_path, monkeypatch):
    path = tmp_path / "node.jsonl"
    monkeypatch.setattr(node_log, "LARGEST", 500)
    monkeypatch.setattr(node_log, "KEEP", 2)
    log = NodeLog(path)
    for number in range(40):
        log.add(run=1, asked="train", round=number, trained=True)
    assert [line["round"] for line in log.lines()] == list(range(40))  # all of today: none is lost
    long_ago = time.time() - 3 * 86_400
    for file in files(path)[:-1]:
        os.utime(file, (long_ago, long_ago))
    for number in range(40, 60):
        log.add(run=1, asked="train", round=number, trained=True)
    left = [line["round"] for line in log.lines()]
    assert left[-20:] == list(range(40, 60))
    assert 0 not in left
    assert next(line["round"] for line in log.lines(since=time.time() - 60)) > 20


def test_a_server_cannot_empty_the_count_of_rounds_by_filling_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(node_log, "LARGEST", 500)
    monkeypatch.setattr(node_log, "KEEP", 1)
    policy = Policy.read({"rounds-a-day": 1, "log": str(tmp_path / "node.jsonl")})
    own, sent = Measure(1.0, 0.5, 10), Broadcast(0, 1.0, None, 0.5)
    assert policy.refuses(fa.Everyone(), own, sent, False, 1) is None
    policy.note(own, sent, None, 1)
    for number in range(50):
        NodeLog(policy.log).add(run=2, asked="query.hello", trained=False, reason=f"flood {number}")
    assert policy.refuses(fa.Everyone(), own, Broadcast(1, 1.0, None, 0.5), False, 1) == "1 rounds a day are enough"


def test_a_damaged_line_names_its_file(tmp_path):
    (tmp_path / "node.jsonl.1").write_text("no json\n")
    (tmp_path / "node.jsonl").write_text("")
    with pytest.raises(fa.FedalignError, match=r"node\.jsonl\.1 has a damaged line, number 1"):
        list(NodeLog(tmp_path / "node.jsonl").lines())


def test_the_audit_log_keeps_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "LARGEST", 300)
    log = AuditLog(tmp_path)
    for number in range(30):
        log.add("client_error", f"site-{number}", reason="so")
    assert [event["client"] for event in audit.read(tmp_path)] == [f"site-{number}" for number in range(30)]
    assert [event["client"] for event in audit.read(tmp_path, 4)] == [f"site-{number}" for number in range(26, 30)]
    assert len(files(tmp_path / "audit.jsonl")) > 5


def test_a_small_log_is_left_alone_and_other_files_too(tmp_path):
    log = tmp_path / "log"
    rotate(log, largest=1)
    log.write_text("short")
    (tmp_path / "log.old").write_text("")
    rotate(log, largest=100)
    assert files(log) == [log]
    with held(log):
        rotate(log, largest=1, keep=0)
    assert files(log) == [tmp_path / "log.1"]


def test_the_servers_log_is_in_the_runs_folder(federation, tmp_path, monkeypatch):
    monkeypatch.setattr(server_log, "LARGEST", 400)
    monkeypatch.setattr(server_log, "KEEP", 2)
    _, server = federation(rule="all", rounds=3)
    server().run()
    out = tmp_path / "out"
    assert "INFO done: 3 rounds" in (out / "server.log").read_text()
    assert sorted(path.name for path in out.glob("server.log*")) == ["server.log", "server.log.1", "server.log.2"]
    before = list(logging.getLogger("flwr").handlers)
    _, server = federation(nodes={2: {"partition-id": 2}}, out=str(tmp_path / "second"))
    with pytest.raises(fa.FedalignError):
        server().run()
    assert "ERROR paused before round 0" in (tmp_path / "second" / "server.log").read_text()
    assert logging.getLogger("flwr").handlers == before
    rows = [json.loads(line) for line in (out / "audit.jsonl").read_text().splitlines()]
    assert rows[0]["event"] == "run_started"
