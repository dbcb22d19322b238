"""Owners' policies with real processes: they hold against any rule, any role and any app that the operator sends."""

import hashlib
import json
import os
import signal
import socket
from pathlib import Path

import foreign_app
import pytest
from processes import LONG, descendants, started, words_of

pytestmark = pytest.mark.processes
SITES = [f"site-{k}" for k in range(4)]  # 0 is a priority client, 1 opted out, 2 is limited, 3 allows one app
TASK = '''
"""Client 2 has labels of its own, so a model of the others has a higher loss there."""
import torch
from fedalign.data.synth import Synth
from fedalign.flower import ClientData

def model():
    return torch.nn.Linear(60, 10)

def data(node_config):
    federation = Synth(priority=1, free=3, samples=60, test_samples=60).federation(seed=0)
    k = int(node_config["partition-id"])
    pool, client = federation.pool, federation.clients[k]
    y = pool.y if k != 2 else (pool.y + 5) % 10
    return ClientData(**{s: (pool.x[client.rows(s)], y[client.rows(s)]) for s in ("train", "heldout", "test")})
'''


def warm_processes(number):
    """Return the warm processes among a node's, without those that they forked."""
    started = [child for child in descendants(number) if b"fedalign.flower.warm" in words_of(child)]
    forked = {grandchild for child in started for grandchild in descendants(child)}
    return [child for child in started if child not in forked]


def socket_of(folder, number):
    """Return the address of a node's warm process."""
    for path in folder.glob("fedalign-node-*/warm/socket"):
        if str(path.parent).encode() in words_of(number):
            return path
    return None


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    config = {
        "site-1": {"opt-out": True, "log": str(folder / "site-1.jsonl")},
        "site-2": {"max-epsilon": 0.1, "log": str(folder / "site-2.jsonl")},
    }
    with started(folder, SITES[:3], 1, {"my_federation/task.py": TASK}, node_config=config, more=["site-3"]) as run:
        run.flwr("build", "--app", run.app)
        (bundle,) = folder.glob("*.fab")
        run.hash = hashlib.sha256(bundle.read_bytes()).hexdigest()
        run.node("site-3", apps=run.hash, log=str(folder / "site-3.jsonl"))
        run.await_nodes("site-3")
        run.foreign = foreign_app.write(folder)
        yield run


def ask(run, name):
    """Let the foreign app's nodes train, and return who did, and the reasons of those that did not."""
    out = run.folder / f"{name}.json"
    run.flwr("run", run.foreign, "here", "--run-config", f'out="{out}" nodes=4')
    run.wait_for(out.exists, what="the foreign app's end")
    found = json.loads(out.read_text())
    return {site for did, site in found if did}, [reason for did, reason in found if not did]


def test_all_does_not_bypass_max_epsilon(running):
    running.run("all", rule="all", rounds=1, warmup=0.0)
    ((record,), _) = running.finish("all")
    assert [c.decision for c in record.clients] == ["trained", "declined", "declined", "admitted"]
    assert (record.clients[1].reason, record.clients[1].loss) == ("opted out", None)
    assert record.clients[2].loss > record.global_loss + 0.1
    assert record.clients[2].reason.endswith(f"not within 0.1 of {record.global_loss:.4g}")


def test_a_foreign_app_does_not_make_a_node_train(running):
    trained, reasons = ask(running, "foreign")
    assert trained == {0}  # which has no limits
    assert reasons.count("opted out") == 1
    assert sum("this node does not allow the app" in reason for reason in reasons) == 1
    lines = [json.loads(line) for line in (running.folder / "site-1.jsonl").read_text().splitlines()]
    assert {(line["reason"], line["trained"]) for line in lines} == {("opted out", False)}
    assert {line["asked"] for line in lines} >= {"train"}
    apps = [json.loads(line).get("app") for line in (running.folder / "site-3.jsonl").read_text().splitlines()]
    assert set(apps) <= {running.hash, None}


def test_policies_stay_when_the_warm_processes_die(running):
    # The app has said in its context that nobody opted out.
    for name in SITES:
        for number in warm_processes(running.processes[name].pid):
            os.kill(number, signal.SIGKILL)
    assert ask(running, "again")[0] == {0}
    assert "the warm process ended (-9) and is started again" in running.said("site-0")
    running.await_nodes(*SITES)


def test_a_stuck_peer_stops_nobody(running):
    folder = Path(running.environment["TMPDIR"])
    (number,) = warm_processes(running.processes["site-0"].pid)
    running.wait_for(lambda: socket_of(folder, number), what="the socket")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(socket_of(folder, number)))  # and sends nothing
        assert ask(running, "beside")[0] == {0}
    assert warm_processes(running.processes["site-0"].pid) == [number]


def test_a_node_ends_with_what_it_started(running):
    process = running.processes.pop("site-2")
    children = descendants(process.pid)
    process.terminate()
    assert process.wait(LONG) in (0, 1)
    running.wait_for(lambda: not any(Path(f"/proc/{number}").exists() for number in children), what="their end")
