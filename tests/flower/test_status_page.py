"""The page of a federation: its status above the report's live view, and what Prometheus reads."""

import json
import os
import shutil
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import in_process
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedalign.monitoring.live_status import LiveStatus
from fedalign.monitoring.status import read_status
from fedalign.report.serve import ReportServer

federation, keys = in_process.federation, in_process.keys
HARM = "<img src=x onerror=\"document.title='owned'\">"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture
def folder(federation, tmp_path):
    """The folder of a run that has done two of five rounds, in which a client has a hostile name and reason."""
    _, server = federation(rule="all")
    server().run()
    out = tmp_path / "out"
    for path in out.iterdir():
        if path.name not in ("config.toml", "rounds.jsonl", "audit.jsonl", "status.json"):
            path.unlink()
    lines = (out / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (out / "all-rounds").write_bytes(b"".join(lines))
    (out / "rounds.jsonl").write_bytes(b"".join(lines[:2]))
    write(out, state="running", round=2, reason=f"</script>{HARM}\x1b")
    return out


def write(out, reason="", **changes):
    status = read_status(out)
    last = replace(status.clients[-1], name=HARM, reason=reason or status.clients[-1].reason)
    changed = replace(status, heartbeat=time.time(), clients=(*status.clients[:-1], last), **changes)
    (out / "status.json").write_text(changed.to_json())


@pytest.fixture
def server(folder):
    with ReportServer(LiveStatus(folder)) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server, path="", **headers):
    request = urllib.request.Request(server.address + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def families(server):
    status, kind, text = ask(server, "metrics")
    assert status == 200
    assert kind.startswith("text/plain; version=")
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_prometheus_own_parser_reads_the_endpoint(server, folder):
    found = families(server)
    assert {s.labels["state"] for s in found["fedalign_state"].samples if s.value} == {"running"}
    assert found["fedalign_rounds_done"].samples[0].value == 2
    assert found["fedalign_rounds_planned"].samples[0].value == 5
    assert found["fedalign_quorum_present_ratio"].samples[0].value == 1
    assert found["fedalign_train_loss"].samples[0].value > 0
    assert time.time() - found["fedalign_heartbeat_timestamp_seconds"].samples[0].value < 60
    clients = {s.labels["client"]: s.labels["role"] for s in found["fedalign_client_connected"].samples}
    assert clients == {"site-0": "priority", "site-1": "priority"} | dict.fromkeys(
        ["site-2", "site-3", "site-4", HARM], "free"
    )
    counts = {(s.labels["client"], s.labels["decision"]): s.value for s in found["fedalign_client_decisions"].samples}
    assert counts["site-0", "trained"] == 2
    assert sum(v for (name, _), v in counts.items() if name == HARM) == 2
    (folder / "rounds.jsonl").write_bytes((folder / "all-rounds").read_bytes())
    write(folder, round=5, state="finished")
    after = families(server)
    assert after["fedalign_rounds_done"].samples[0].value == 5
    assert {s.labels["state"] for s in after["fedalign_state"].samples if s.value} == {"finished"}
    assert after["fedalign_models_sent"].samples[0].value > found["fedalign_models_sent"].samples[0].value


def test_the_page_shows_status_report_and_audit_log_with_names_escaped(server, folder):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    status, kind, page = ask(server)
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert "Running: 2 of 5 rounds are done" in page
    assert "run_started" in page
    assert 'id="summary"' in page
    assert HARM not in page
    assert "&lt;img src=x" in page
    assert "\x1b" not in page
    _, kind, part = ask(server, "federation")
    assert kind == "text/html; charset=utf-8"
    assert "site-0" in part
    assert HARM not in part
    _, kind, text = ask(server, "status.json")
    assert (kind, json.loads(text)["state"]) == ("application/json", "running")
    assert json.loads(ask(server, "data")[2])["status"] == "Live. out: round 2 of 5"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_others_get_nothing(server):
    for path in ("", "metrics", "status.json", "federation", "data"):
        assert ask(server, path, Host="example.org")[0] == 403
    assert ask(server, "audit.jsonl")[0] == 404
    assert server.address.startswith("http://127.0.0.1:")


def test_a_run_before_its_first_round_and_a_dead_server(server, folder):
    (folder / "rounds.jsonl").unlink()
    write(folder, state="waiting", round=0)
    assert "Waiting for the priority clients&#39; quorum" in ask(server)[2]
    assert ask(server, "data")[0] == 200
    assert "fedalign_models_sent" in families(server)
    status = replace(read_status(folder), heartbeat=time.time() - 3600)
    (folder / "status.json").write_text(status.to_json())
    assert "The server has ended without a word" in ask(server, "federation")[2]
    assert {s.labels["state"] for s in families(server)["fedalign_state"].samples if s.value} == {"dead"}


def test_a_damaged_status_is_told(server, folder):
    (folder / "status.json").write_text("{")
    for path in ("", "metrics", "federation", "status.json"):
        status, _, text = ask(server, path)
        assert status == 500
        assert "status.json cannot be read" in text


@pytest.mark.slow
def test_chromium_opens_the_page_and_follows_the_run(server, folder):
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with playwright.sync_playwright() as started:
        found = [path for path in map(shutil.which, BROWSERS) if path] or [started.chromium.executable_path]
        if not Path(found[0]).exists():
            pytest.skip("there is no Chromium on this machine: install one, or run `playwright install chromium`")
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        with started.chromium.launch(executable_path=found[0], args=options) as chromium:
            page = chromium.new_page()
            errors, asked = [], []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("request", lambda request: asked.append(request.url))
            page.goto(server.address)
            page.wait_for_selector("html[data-ready]", timeout=30_000)
            assert page.text_content("#state") == "running"
            clients = page.locator("table.clients tbody tr")
            assert clients.count() == 6
            assert clients.nth(5).locator("th").text_content() == HARM
            assert page.locator("#federation img").count() == 0
            assert page.title() == "out"
            assert "all" in page.text_content("#summary-words")
            assert page.locator("#curves canvas").count() > 0
            (folder / "rounds.jsonl").write_bytes((folder / "all-rounds").read_bytes())
            write(folder, round=5, state="finished")
            page.wait_for_function("document.getElementById('state').textContent === 'finished'", timeout=30_000)
            page.wait_for_function("document.getElementById('summary-words').textContent.includes('5')", timeout=30_000)
            assert "Finished: 5 of 5 rounds" in page.text_content("#federation-status")
            assert errors == []
            assert all(url.startswith(server.address) or url.startswith("data:") for url in asked)
