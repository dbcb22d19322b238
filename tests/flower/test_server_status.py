"""``status.json``: what the server writes about itself and its clients, whatever becomes of the run."""

import json
import time

import in_process
import pytest
from flwr.app import Error, Message

import fedalign as fa
from fedalign.flower import server_status
from fedalign.monitoring.status import read_status

federation, keys = in_process.federation, in_process.keys


def test_a_finished_run(federation, tmp_path):
    _, server = federation(rule="all", rounds=2)
    before = time.time()
    server().run()
    status = read_status(tmp_path / "out")
    assert (status.state, status.round, status.rounds, status.rule, status.note) == ("finished", 2, 2, "all", "")
    assert (status.quorum.needed, status.quorum.present, status.quorum.missing) == (1.0, 1.0, ())
    assert [c.name for c in status.clients] == [f"site-{k}" for k in range(6)]
    assert [c.priority for c in status.clients] == [True, True] + [False] * 4
    assert {c.decision for c in status.clients} == {"trained", "admitted"}
    assert all(
        c.connected and c.round == 1 and c.samples and before <= c.last_seen <= time.time() for c in status.clients
    )
    assert status.waiting_for is None
    assert "training" in status.waited
    assert status.state_at(time.time() + 1e6) == "finished"


def test_a_run_that_pauses_without_its_quorum(federation, tmp_path):
    nodes = {k: {"partition-id": k} for k in (0, 2, 3)}
    _, server = federation(nodes=nodes, rule="all")
    with pytest.raises(fa.FedalignError, match="paused before round 0"):
        server().run()
    status = read_status(tmp_path / "out")
    assert (status.state, status.round) == ("paused", 0)
    assert "not connected: site-1" in status.note
    assert "resume=" in status.note
    assert (status.quorum.present, status.quorum.missing) == (0.5, ("site-1",))
    assert [c.connected for c in status.clients] == [True, False, True, True, False, False]
    assert status.clients[1].last_seen is None


def test_while_it_waits_it_says_for_whom(federation, tmp_path, monkeypatch):
    grid, server = federation(nodes={1: {"partition-id": 1}}, rule="all", rounds=1, wait=60.0)
    waiting = []

    def sleep(seconds):
        waiting.append(read_status(tmp_path / "out"))
        grid.nodes[0] = {"partition-id": 0}

    monkeypatch.setattr("fedalign.flower.server_app.time.sleep", sleep)
    server().run()
    assert (waiting[0].state, waiting[0].waiting_for.what) == ("waiting", "quorum")
    assert waiting[0].waiting_for.clients == ("site-0",)
    assert read_status(tmp_path / "out").state == "finished"


def test_while_clients_train_it_says_whose_answers_are_missing(federation, tmp_path, monkeypatch):
    seen = []
    grid, server = federation(rule="all", rounds=1, timeout=1.0)
    made = server()

    def silent(reply, message):
        if message.metadata.message_type == "train":
            return None
        return reply

    def sleep(seconds):
        seen.append(made._status.status())
        real(seconds)

    real = time.sleep
    grid.tamper[3] = silent
    monkeypatch.setattr("fedalign.flower.patience.time.sleep", sleep)
    made.run()
    assert (seen[0].state, seen[0].waiting_for.what, seen[0].waiting_for.clients) == (
        "running",
        "training",
        ("site-3",),
    )
    last = read_status(tmp_path / "out").clients[3]
    assert (last.decision, last.reason) == ("lost", "no answer in 1 s")


def test_an_answer_that_flower_gives_does_not_count_as_seen(federation, tmp_path):
    grid, server = federation(rule="all", rounds=1)
    made = server()
    grid.tamper[4] = lambda reply, message: Message(Error(5, "gone"), reply_to=message)
    before = time.time()
    made.run()
    status = read_status(tmp_path / "out")
    assert status.clients[4].samples is None
    assert status.clients[3].last_seen > before


def test_a_crash_is_failed_with_its_reason(federation, tmp_path, monkeypatch):
    _, server = federation(rule="all")
    made = server()
    monkeypatch.setattr(made._driver, "answer", lambda request: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.run()
    status = read_status(tmp_path / "out")
    assert (status.state, status.note) == ("failed", "ZeroDivisionError: division by zero")


def test_a_resumed_run_begins_with_the_decisions_of_its_last_round(federation, tmp_path):
    _, server = federation(rule="all", rounds=2)
    server().run()
    _, server = federation(nodes={2: {"partition-id": 2}}, rule="all", rounds=2, resume=str(tmp_path / "out"))
    with pytest.raises(fa.FedalignError, match="not connected: site-0, site-1"):
        server().run()
    status = read_status(tmp_path / "out")
    assert (status.state, status.round) == ("paused", 2)
    assert [c.decision for c in status.clients] == ["trained"] * 2 + ["admitted"] * 4


def test_the_heartbeat_tells_a_dead_server(federation, tmp_path, monkeypatch):
    monkeypatch.setattr(server_status, "INTERVAL", 0.02)
    _, server = federation(rule="all")
    made = server()
    beats = []

    def answer(request):
        for _ in range(2):
            first = read_status(tmp_path / "out").heartbeat
            until = time.monotonic() + 20
            while read_status(tmp_path / "out").heartbeat == first and time.monotonic() < until:
                time.sleep(0.01)
            beats.append(first)
        raise SystemExit

    monkeypatch.setattr(made._driver, "answer", answer)
    with pytest.raises(SystemExit):
        made.run()
    assert beats[0] < beats[1]
    status = read_status(tmp_path / "out")
    assert (status.state, status.note) == ("paused", "the server was told to end")
    text = json.loads((tmp_path / "out" / "status.json").read_text()) | {"state": "running"}
    (tmp_path / "out" / "status.json").write_text(json.dumps(text))
    dead = read_status(tmp_path / "out")
    assert dead.state_at(dead.heartbeat + 0.05) == "running"
    assert dead.state_at(dead.heartbeat + 1) == "dead"


def test_a_disk_that_is_full_does_not_stop_the_run(federation, tmp_path, monkeypatch, caplog):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(server_status, "write_atomically", full)
    _, server = federation(rule="all", rounds=1)
    with caplog.at_level("WARNING", logger="flwr"):
        server().run()
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert [r.getMessage() for r in caplog.records if "status.json" in r.getMessage()] == [
        f"{tmp_path / 'out' / 'status.json'} cannot be written: No space left on device"
    ]


def test_a_status_that_cannot_be_made_does_not_stop_the_heartbeat(federation, tmp_path, monkeypatch):
    monkeypatch.setattr(server_status, "INTERVAL", 0.02)
    _, server = federation(rule="all")
    made = server()
    real, asked = made._driver.members.roster, []

    def roster():
        asked.append(1)
        if len(asked) < 4:
            raise fa.FedalignError("no client is a priority client")
        return real()

    monkeypatch.setattr(made._driver.members, "roster", roster)
    with made._status:
        until = time.monotonic() + 20
        while not (tmp_path / "out" / "status.json").exists() and time.monotonic() < until:
            time.sleep(0.01)
    assert read_status(tmp_path / "out").state == "finished"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "has no status.json"),
        ("{", "status.json cannot be read"),
        ("[1]", "status.json cannot be read"),
        ('{"state": "running"}', "status.json cannot be read"),
    ],
)
def test_a_folder_without_a_usable_status(tmp_path, text, said):
    with pytest.raises(fa.FedalignError, match="is not a run's folder"):
        read_status(tmp_path)
    (tmp_path / "config.toml").write_text("")
    if text is not None:
        (tmp_path / "status.json").write_text(text)
    with pytest.raises(fa.FedalignError, match=said):
        read_status(tmp_path)
    with pytest.raises(fa.FedalignError, match="there is no folder"):
        read_status(tmp_path / "nowhere")
