"""``fedalign flower status`` and ``audit``: what they say at every stage of a run, and to whom."""

import json
import os
import time
from dataclasses import replace

import in_process
import pytest
from prometheus_client.parser import text_string_to_metric_families

import fedalign as fa
from fedalign.cli import main
from fedalign.flower.audit import AuditLog
from fedalign.monitoring.live_status import LiveStatus
from fedalign.monitoring.status import ClientStatus, Quorum, Status, WaitingFor
from fedalign.monitoring.words import sentences

federation, keys = in_process.federation, in_process.keys
NOW = 1000.0
RUNNING = Status(
    "running", 3, 50, "fedalign", "7", 10.0, NOW - 1, 3.0, Quorum(1.0, 1.0), pid=12, host="server",
    round_began=NOW - 20, last_round=NOW - 20, round_seconds=4.2, waited={"training": 3.5},
)  # fmt: skip


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (RUNNING, "Running: 3 of 50 rounds are done; now round 3, which began 20 s ago."),
        (
            replace(RUNNING, waiting_for=WaitingFor("training", ("site-3", "site-4"), NOW - 75)),
            "It waits for the updates of site-3, site-4, for 1 min 15 s.",
        ),
        (
            replace(RUNNING, note="round 3 is repeated: no update from site-1", attempts=1),
            "round 3 is repeated: no update from site-1 (attempt 2).",
        ),
        (
            replace(
                RUNNING,
                state="waiting",
                quorum=Quorum(1.0, 0.5, ("site-1",)),
                waiting_for=WaitingFor("quorum", (), 970.0),
            ),
            "Waiting for the priority clients' quorum, for 30 s: site-1; 3 of 50 rounds are done.",
        ),
        (
            replace(RUNNING, quorum=Quorum(0.8, 0.5, ("site-1",))),
            "0.5 of the priority clients' weight is connected, 0.8 is",
        ),
        (replace(RUNNING, state="paused", note="paused before round 3: so; resume=…"), "Paused before round 3: so"),
        (
            replace(RUNNING, state="paused", note="told to end"),
            "Paused after 3 of 50 rounds: told to end; continue: flwr run",
        ),
        (
            replace(RUNNING, state="failed", note="OSError: disk"),
            "Failed after 3 of 50 rounds: OSError: disk; continue:",
        ),
        (replace(RUNNING, state="stopped", note="good enough"), "Ended early, after 3 of 50 rounds: good enough."),
        (replace(RUNNING, state="finished", round=50), "Finished: 50 of 50 rounds, 1 s ago."),
        (replace(RUNNING, round=50), "Running: all 50 of 50 rounds are done; the last measures"),
        (
            replace(RUNNING, heartbeat=NOW - 90),
            "The server has ended without a word: process 12 on server gave its last sign of life 1 min 30 s ago",
        ),
        (RUNNING, "The last round ended 20 s ago and took 4.2 s, of which it waited for clients: training 3.5 s."),
    ],
)
def test_every_state_has_its_sentence(status, said):
    assert said in "\n".join(sentences(status, NOW, "out"))


def test_the_commands_of_an_operator(federation, tmp_path, capsys):
    nodes = {k: {"partition-id": k} for k in range(6)}
    nodes[4]["opt-out"] = True
    _, server = federation(nodes=nodes, rule="all", rounds=2)
    server().run()
    out = str(tmp_path / "out")
    assert main(["flower", "status", out]) == 0
    said = capsys.readouterr().out
    assert "Finished: 2 of 2 rounds" in said
    row = next(line for line in said.splitlines() if line.startswith("site-4"))
    assert "free" in row
    assert "opted out" in row
    assert main(["flower", "status", out, "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert (known["state"], known["round"], known["clients"][0]["name"]) == ("finished", 2, "site-0")
    assert known["heartbeat_age"] >= 0
    assert main(["flower", "status", out, "--prometheus"]) == 0
    families = {family.name: family for family in text_string_to_metric_families(capsys.readouterr().out)}
    assert families["fedalign_rounds_done"].samples[0].value == 2
    assert main(["flower", "audit", out]) == 0
    assert "run_started" in capsys.readouterr().out
    assert main(["flower", "audit", out, "--json", "--last", "1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["event"] == "run_ended"


def test_the_newest_run_is_the_default(federation, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fedalign.cli.flower_status.RUNS", tmp_path / "runs")
    assert main(["flower", "status"]) == 2
    assert "has no run over Flower" in capsys.readouterr().err
    for name, state in (("11", "paused"), ("22", "finished")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "status.json").write_text(replace(RUNNING, state=state).to_json())
    os.utime(tmp_path / "runs" / "11" / "status.json", (1, 1))
    assert main(["flower", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status", "nowhere"], "there is no folder nowhere"),
        (["status", "."], "is not a run's folder"),
        (["status", ".", "--port", "80"], "--port needs --serve"),
        (["status", ".", "--json", "--serve"], "not allowed with"),
        (["audit", "."], "has no audit.jsonl"),
        (["audit", ".", "--last", "0"], "--last must be at least 1, not 0"),
    ],
)
def test_wrong_input_is_one_sentence(words, said, capsys):
    assert main(["flower", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_bad_port(federation, tmp_path, capsys):
    _, server = federation(rule="all", rounds=1)
    server().run()
    assert main(["flower", "status", str(tmp_path / "out"), "--serve", "--port", "70000"]) == 2
    assert "--port must be from 0 to 65535, not 70000" in capsys.readouterr().err


def test_strangers_texts_do_no_harm_in_a_terminal(tmp_path, capsys):
    harm = ClientStatus(0, "\x1b[b]a[/b]", False, decision="refused", reason="\x1b]0;owned\x07 \u202egnp.exe\nx")
    (tmp_path / "status.json").write_text(replace(RUNNING, heartbeat=time.time(), clients=(harm,)).to_json())
    AuditLog(tmp_path).add("client_error", "a\x1b[31m", reason="[bold]x[/bold]\x07")
    assert main(["flower", "status", str(tmp_path)]) == 0
    assert main(["flower", "audit", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert not set(said) & set("\x1b\x07\u202e")
    assert "[b]a[/b]" in said
    assert "[bold]x[/bold]" in said


def test_a_run_of_an_earlier_version_says_so(tmp_path):
    (tmp_path / "config.toml").write_text('rule = "all"\nroster = "r"\n')
    with pytest.raises(fa.FedalignError, match=r"has no status\.json: only runs over Flower have one"):
        LiveStatus(tmp_path)
