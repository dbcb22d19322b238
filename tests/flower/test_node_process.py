"""The parts of `fedalign flower node`: the gate, the hand-over, the warm process and the supervisor."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from flwr.app import Message, RecordDict
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedalign.flower import hand_over, supervise
from fedalign.flower.app_hash import app_bundle, app_hash
from fedalign.flower.declining import DECLINED
from fedalign.flower.gate import Gate
from fedalign.flower.guard import with_config
from fedalign.flower.new_app import create
from fedalign.flower.policy import Policy

HASH = "a" * 64


@pytest.fixture
def message(monkeypatch):
    for name in ("task", "run", "node"):  # which Flower sets in an app's process
        monkeypatch.setattr(TaskIdentity, f"_{name}_id", 1)
    made = Message(RecordDict(), 1, "train")
    made.metadata.__dict__["_message_id"] = "message"
    return made


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("app") / "my-app"
    create(folder)
    return app_bundle(folder)


def passed(policy, message, bundle, kind="flwr-serverapp", **settings):
    """Send a message through the gate; return whether it became a task, and the reply that was stored."""
    stored, tasks = [], []

    def fetch(*, receive, get_run, get_fab, state, object_store):
        if (found := receive()) is None:
            return None
        run = get_run(found[0].metadata.run_id)
        get_fab(run.fab_hash, found[0].metadata.run_id)
        tasks.append(found)
        return 1

    gate = Gate(policy, fetch, lambda reply, state, store: stored.append(reply))
    empty = Run.create_empty(1)
    changed = {key.replace("_", "-"): value for key, value in settings.items()}
    run = gate(
        receive=lambda: (message, "tree") if message else None,
        get_run=lambda number: replace(empty, fab_hash=HASH, primary_task_type=kind, override_config=changed),
        get_fab=lambda claimed, run: SimpleNamespace(content=bundle, hash_str=claimed),
        state="state",
        object_store="store",
    )
    assert run == (1 if message else None)
    return bool(tasks), [(reply.error.code, reply.error.reason) for reply in stored]


def test_the_gate(message, bundle, tmp_path):
    log = tmp_path / "log.jsonl"
    assert passed(Policy(log=log), message, bundle) == (True, [])
    assert passed(Policy(opt_out=True, log=log), message, bundle) == (False, [(DECLINED, "opted out")])
    real = hashlib.sha256(bundle).hexdigest()
    reason = f"this node does not allow the app {real}"  # the hash that the server claims does not count
    assert passed(Policy(apps=HASH, log=log), message, bundle) == (False, [(DECLINED, reason)])
    assert passed(Policy(apps=f"{HASH} {real}"), message, bundle) == (True, [])
    assert passed(Policy(), message, bundle, "flwr-agentapp") == (False, [(DECLINED, "this node runs no agents")])
    assert passed(Policy(opt_out=True), None, bundle) == (False, [])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["asked"], line.get("app"), line.get("reason")) for line in lines] == [
        ("app", real, None), ("train", None, "opted out"), ("train", None, reason)
    ]  # fmt: skip


def test_settings_bring_no_code_to_an_allowed_app(message, bundle):
    policy = Policy(apps=hashlib.sha256(bundle).hexdigest())
    assert passed(policy, message, bundle, rule="fedalign", lr=0.5, data="my_app.task:data", out="/a/b:c")[0]
    done, ((code, reason),) = passed(policy, message, bundle, client_steps="clip; subprocess:Popen(args='ls')")
    assert (done, code) == (False, DECLINED)
    assert reason.endswith("client-steps = clip; subprocess:Popen(args='ls')")
    assert passed(Policy(), message, bundle, data="os:abort")[0]  # who names no apps trusts the operator


@pytest.mark.parametrize(
    "hidden",
    [
        {"client_steps": r'[{ kind = "subprocess\u003agetoutput", cmd = "ls" }]'},
        {"aggregator": r"nnm(f=1, then='subprocess\x3agetoutput')"},
        {"aggregator": "nnm(f=1, then='subprocess' ':getoutput')"},
        {"aggregator": "nnm(f=1, then='subprocess:' 'getoutput')"},
    ],
)
def test_no_name_of_code_is_hidden_in_the_notation(message, bundle, hidden):
    policy = Policy(apps=hashlib.sha256(bundle).hexdigest())
    assert not passed(policy, message, bundle, **hidden)[0]
    assert passed(policy, message, bundle, device="cuda:0", aggregator="trimmed-mean(trim=0.2)")[0]


def test_a_context_has_the_owners_config():
    changed = SimpleNamespace(node_config={"opt-out": False})
    pull = with_config(lambda client: ("message", changed, "run", "bundle"), {"max-loss": 1.0})
    assert pull(None)[1].node_config == {"max-loss": 1.0}


def test_the_hash_is_of_what_flower_sends(tmp_path):
    create(tmp_path / "my-app")
    first = app_hash(tmp_path / "my-app")
    assert first == app_hash(tmp_path / "my-app")
    with (tmp_path / "my-app" / "my_app" / "task.py").open("a") as file:
        file.write("# changed\n")
    assert app_hash(tmp_path / "my-app") != first


@pytest.mark.parametrize(("answer", "taken"), [(hand_over.TAKEN, True), (b"", False), (b"no", False), (None, False)])
def test_a_hand_over_is_acknowledged(tmp_path, monkeypatch, answer, taken):
    monkeypatch.setattr(hand_over, "PATIENCE", 0.2 if answer is None else 60.0)
    given_up = threading.Event()
    address, got = tmp_path / "socket", []
    assert not hand_over.handed_over(str(address), ["--token", "1"])  # nobody is there
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        server.listen()

        def take():
            connection, _ = server.accept()
            with connection:
                if answer is None:
                    given_up.wait(60)  # it does not even read
                    return
                with connection.makefile("rb") as file:
                    got.append(file.read())
                connection.sendall(answer)

        thread = threading.Thread(target=take)
        thread.start()
        assert hand_over.handed_over(str(address), ["--token", "1"]) is taken
        given_up.set()
        thread.join()
    assert got == ([] if answer is None else [b"--token\x001"])


@pytest.mark.slow
def test_the_warm_process_serves_one_peer_beside_another(tmp_path):
    (tmp_path / "node-config.json").write_text("{}")
    folder = tmp_path / "warm"
    folder.mkdir()
    ends, lives = os.pipe()
    warm = subprocess.Popen(
        [sys.executable, "-m", "fedalign.flower.warm", str(folder), str(ends)],
        pass_fds=[ends], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        os.close(ends)
        address, deadline = folder / "socket", time.monotonic() + 3000
        while not address.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as impatient:
            silent.connect(str(address))
            impatient.connect(str(address))
            impatient.sendall(b"--version-of-somebody-who-left")
            impatient.close()
            assert hand_over.handed_over(str(address), ["--help"])
            os.close(lives)
            assert warm.wait(300) == 0
        said = warm.stdout.read()  # ends when the children have ended
        assert "Run a Flower ClientApp" in said
        assert "left" not in said
    finally:
        warm.kill()
        warm.wait()
        warm.stdout.close()


PYTHON = """#!/bin/sh
echo "$2" >> "{folder}/started"
case "$2" in
  *warm) sleep 0.1; exit 3 ;;
  *) trap 'exit 5' TERM; sleep 60 & wait ;;
esac
"""


@pytest.mark.parametrize("end", ["a signal", "no files"])
def test_the_supervisor(tmp_path, end):
    folder, fake = tmp_path / "node", tmp_path / "python"
    folder.mkdir()
    for name in supervise.NEEDED:
        (folder / name).write_text("")
    fake.write_text(PYTHON.format(folder=tmp_path))
    fake.chmod(0o700)
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen([sys.executable, "-IS", supervise.__file__, str(fake), str(folder)], stderr=said)
    try:
        started, deadline = tmp_path / "started", time.monotonic() + 300
        while time.monotonic() < deadline and (
            not started.exists() or started.read_text().count("fedalign.flower.warm") < 2  # it was started again
        ):
            time.sleep(0.05)
        if end == "a signal":
            process.send_signal(signal.SIGTERM)
        else:
            (folder / supervise.NEEDED[0]).unlink()
        assert process.wait(300) == 5
        said = (tmp_path / "said").read_text()
        assert "the warm process ended (3) and is started again in 2 s" in said
        assert ("without which the owner's limits do not hold" in said) == (end == "no files")
        assert not folder.exists()
        assert started.read_text().splitlines().count("fedalign.flower.supernode") == 1
    finally:
        process.kill()
        process.wait()
