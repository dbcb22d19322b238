"""``fedalign report --serve``: what the server answers, to whom, and that it follows a run without touching it."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request

import pytest

from fedalign.cli import main
from fedalign.errors import FedalignError
from fedalign.report.follow import FollowedRun
from fedalign.report.read_runs import read_run
from fedalign.report.serve import LiveReport, ReportServer

RUN = ["run", "synth-low", "--rounds", "5", "--seeds", "2", "--quiet", "--device", "cpu", "--arms", "priority,local"]
SMALL = ["--set", "data.samples=40", "--set", "data.priority=2", "--set", "data.free=3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("serve") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedalign.report.page.gallery", lambda run: [])
        assert main([*RUN, *SMALL, "--out", str(out)]) == 0
    return out


@pytest.fixture
def folder(finished, tmp_path):
    """A run of five rounds that has done three of them."""
    out = tmp_path / "run"
    for path in finished.rglob("*"):
        if path.name in ("config.toml", "rounds.jsonl"):
            target = out / path.relative_to(finished)
            target.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_bytes().splitlines(keepends=True)
            target.write_bytes(b"".join(lines[:3] if path.suffix == ".jsonl" else lines))
    return out


@pytest.fixture
def server(folder):
    with ReportServer(LiveReport([folder])) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server, path="", **headers):
    request = urllib.request.Request(
        server.address + path, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def test_the_page_and_its_data(server, folder):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    status, _, page = ask(server)
    assert status == 200
    assert b"data-live" in page
    assert b"round 3 of 5" in page
    status, headers, body = ask(server, "data")
    assert status == 200
    assert json.loads(body)["status"] == "Live. synth-low: round 3 of 5"
    assert ask(server, "data", If_None_Match=headers["ETag"])[0] == 304
    assert float(headers["X-Pause"]) >= 2
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_it_listens_on_this_machine_and_answers_to_its_own_name_only(server):
    assert server.address.startswith("http://127.0.0.1:")
    assert ask(server, Host="example.org")[0] == 403
    assert ask(server, "config.toml")[0] == 404
    assert ask(server, "../etc/passwd")[0] == 404


def test_damage_is_told(server, folder):
    log = folder / "priority" / "seed-0" / "rounds.jsonl"
    log.write_bytes(b"not json\n")
    status, _, body = ask(server, "data")
    assert status == 500
    assert b"rounds.jsonl, line 1 is damaged" in body


def test_a_run_is_followed_line_by_line(folder, finished):
    run = FollowedRun(folder)
    mark, first = run.mark(), run.read()
    assert [len(h) for h in first.histories["priority"].values()] == [3, 3]
    assert first.summary["arms"]["local"]["alone"]
    assert not first.summary["arms"]["priority"]["alone"]
    log = folder / "priority" / "seed-0" / "rounds.jsonl"
    lines = (finished / "priority" / "seed-0" / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:4]) + lines[4][:30])
    assert run.mark() != mark
    assert len(run.read().histories["priority"][0]) == 4
    log.write_bytes(b"".join(lines))
    assert run.read().histories["priority"][0] == read_run(finished).histories["priority"][0]
    log.write_bytes(lines[0])  # as a resume cuts a log
    assert len(run.read().histories["priority"][0]) == 1
    log.unlink()
    assert len(run.read().histories["priority"][0]) == 0


def test_a_finished_run_has_its_own_summary(finished):
    assert FollowedRun(finished).read() == read_run(finished)


def test_repeated_rounds_are_refused(folder):
    log = folder / "priority" / "seed-0" / "rounds.jsonl"
    log.write_bytes(log.read_bytes() * 2)
    with pytest.raises(FedalignError, match=r"rounds\.jsonl, line 4 is damaged or out of order"):
        FollowedRun(folder).read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere", "--serve"], "nowhere is not a run's folder: it has no config.toml"),
        (["nowhere", "--port", "80"], "--port needs --serve"),
        (["nowhere", "--serve", "--out", "x"], "--serve writes nothing, so it takes no --out"),
        (["nowhere", "--serve", "--port", "70000"], "--port must be from 0 to 65535, not 70000"),
    ],
)
def test_bad_input(options, message, capsys):
    assert main(["report", *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_port_that_is_taken(server, folder):
    port = server.server_address[1]
    with pytest.raises(FedalignError, match=f"cannot listen on 127.0.0.1, port {port}"):
        ReportServer(LiveReport([folder]), port)


def test_the_command_prints_the_address_and_ends_on_an_interrupt(folder, capsys, monkeypatch):
    def interrupted(self, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(ReportServer, "serve_forever", interrupted)
    assert main(["report", str(folder), "--serve"]) == 0
    assert "http://127.0.0.1:" in capsys.readouterr().out
