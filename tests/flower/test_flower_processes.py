"""Real SuperLink and SuperNode processes on the loopback address, with TLS and authenticated nodes."""

import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
from processes import LONG, NGINX, started

import fedalign as fa
from fedalign.monitoring.status import read_status

pytestmark = pytest.mark.processes  # some minutes: `make test-flower`
NODES = [f"site-{k}" for k in range(6)]
# One free client is far off (its labels are others), one far too easy (a priority client's usual class, writ large).
TASK = '''
"""Two priority clients, four free ones."""
import torch
from fedalign.data.synth import Synth
from fedalign.flower import ClientData

def model():
    return torch.nn.Linear(60, 10)

def all_data():
    federation = Synth(priority=2, free=4, samples=60, test_samples=60).federation(seed=0)
    clients = []
    for client in federation.clients:
        pool = federation.pool
        parts = {s: (pool.x[client.rows(s)], pool.y[client.rows(s)]) for s in ("train", "heldout", "test")}
        clients.append(parts)
    clients[1]["train"] = tuple(part[:40] for part in clients[1]["train"])  # site 0 weighs 0.55, site 1 0.45
    clients[4] = {s: (x, (y + 5) % 10) for s, (x, y) in clients[4].items()}
    x, y = clients[1]["train"]
    usual = y == y.mode().values
    clients[5] = {s: (2 * x[usual], y[usual]) for s in clients[5]}
    return clients

def data(node_config):
    return ClientData(**all_data()[int(node_config["partition-id"])])
'''

# A user's own rule and tracker: the rule is named beside the app's package, the tracker in it.
MINE = '''
"""Every second offer is admitted, and a tracker writes a line for every round."""
import fedalign as fa

class Half(fa.Rule):
    def offers(self, own, broadcast):
        return own.loss <= broadcast.loss + 2

    def select(self, offers, broadcast):
        return fa.Selection(tuple(sorted(offers))[::2], reasons=dict.fromkeys(offers, "every second offer"))

class Lines(fa.Callback):
    needs_model = False

    def on_start(self, run):
        self.path = run.folder / "lines.txt"

    def on_round(self, record, model):
        with self.path.open("a") as file:
            file.write(f"{record.round} {record.admitted}\\n")
'''


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    # The rule is named as in an experiment, mine:Half.
    files = {"my_federation/task.py": TASK, "mine.py": MINE, "my_federation/mine.py": MINE}
    said = {"site-5": {"priority": True, "role": "priority"}}  # it may say what it likes of itself
    with started(tmp_path_factory.mktemp("flower"), NODES, 2, files, "site-2", said) as federation:
        yield federation


@pytest.fixture(scope="module")
def ended(running):
    """AutoALIGN, with the server killed in round 3 of 4; an undisturbed run of FedALIGN; a user's own rule."""
    running.run("auto", rule="auto")
    running.wait_for(lambda: len(running.history("auto")) >= 2, what="round 2")
    running.kill("superlink")  # and the ServerApp, which it started
    assert len(running.history("auto")) < 4
    assert not (running.folder / "auto" / "model.safetensors").exists()
    running.superlink()
    running.run("auto", rule="auto", resume=str(running.folder / "auto"))
    running.run("fedalign", rule="fedalign")
    running.run("half", rule="mine:Half", trackers="my_federation.mine:Lines", rounds=2, warmup=0.0)
    return {name: running.finish(name) for name in ("fedalign", "auto", "half")}


def definitions(text):
    """Run a module's text and return its names."""
    names = {"__name__": "definitions"}
    exec(text, names)
    return names


def simulated(rule, rounds=4, warmup=0.25):
    """Do the same in a simulation, with the app's own data function."""
    names = definitions(TASK)
    clients = names["all_data"]()
    data = fa.Federation.from_arrays(
        *([c[split] for c in clients] for split in ("train", "heldout", "test")),
        priority=[k < 2 for k in range(6)],
        heldout_fraction=0,
    )
    local = fa.LocalSGD(lr=0.1, epochs=2, batch_size=20)
    return fa.simulate(data, names["model"], rule, rounds, warmup, local, device="cpu")


@pytest.mark.parametrize(("name", "rule"), [("fedalign", fa.Align(0.6)), ("auto", fa.AutoAlign())])
def test_decisions_and_weights_are_the_simulations(ended, name, rule):
    history, weights = ended[name]
    expected = simulated(rule)
    assert len(history) == 4
    for mine, theirs in zip(history, expected.history.rounds, strict=True):
        assert [c.decision for c in mine.clients] == [c.decision for c in theirs.clients]
        # The node that calls itself a priority client is a free one.
        assert [c.priority for c in mine.clients] == [True, True, False, False, False, False]
        assert mine.epsilon == pytest.approx(theirs.epsilon, abs=1e-5)
    for key, value in expected.model.state_dict().items():
        assert torch.allclose(weights[key], value, atol=1e-5)
    if name == "fedalign":
        off = {r.clients[4].decision for r in history[1:] if r.clients[4].loss > r.global_loss + 0.6}
        easy = {r.clients[5].decision for r in history[1:] if r.clients[5].loss < r.global_loss - 0.6}
        assert (off, easy) == ({"declined"}, {"refused"})  # the client says no to the one, the server to the other


def test_a_users_own_rule_decides_as_in_the_simulation(running, ended):
    history, weights = ended["half"]
    expected = simulated(definitions(MINE)["Half"](), rounds=2, warmup=0.0)
    for mine, theirs in zip(history, expected.history.rounds, strict=True):
        assert [c.decision for c in mine.clients] == [c.decision for c in theirs.clients]
        assert [c.weight for c in mine.clients] == pytest.approx([c.weight for c in theirs.clients])
        offered = [c for c in mine.clients if c.decision in ("admitted", "refused")]
        assert [c.decision for c in offered] == (["admitted", "refused"] * 2)[: len(offered)]
        assert {c.reason for c in offered} == {"every second offer"}
    for key, value in expected.model.state_dict().items():
        assert torch.allclose(weights[key], value, atol=1e-5)
    lines = (running.folder / "half" / "lines.txt").read_text().splitlines()
    assert lines == [f"{r.round} {r.admitted}" for r in history]


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed, which examples/flower/nginx.conf is for")
def test_the_proxy_lets_nodes_through_and_nobody_else(running, ended):
    assert {r.clients[2].decision for r in ended["fedalign"][0][1:]} == {"admitted"}  # site 2 is behind it
    trusting = ssl.create_default_context(cafile=running.keys / "ca.crt")

    def ask(port, path):
        request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", b"", method="POST")
        try:
            with urllib.request.urlopen(request, context=trusting, timeout=20) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    for path in ("/v1/control/list-nodes", "/v1/control/start-run", "/v1/runtime/acquire-task", "/docs"):
        assert ask(running.proxy, path) == 403
    # Without it, anybody who reaches the port may use the control API.
    assert ask(running.port, "/v1/control/list-nodes") not in (401, 403)


def test_an_unregistered_key_cannot_join(running, ended):
    running.node("stranger")
    process, log = running.processes["stranger"], running.folder / "stranger.log"
    running.wait_for(lambda: process.poll() is not None, what="the stranger's refusal")
    assert process.returncode != 0
    assert "SuperNode ID" not in log.read_text()
    running.kill("stranger")


@pytest.mark.parametrize("end", ["its node ends", "it is told to end"])
def test_the_warm_process_leaves_nothing(tmp_path, end):
    folder = tmp_path / "node"
    folder.mkdir()
    ends, lives = os.pipe()
    warm = subprocess.Popen([sys.executable, "-m", "fedalign.flower.warm", str(folder), str(ends)], pass_fds=[ends])
    try:
        os.close(ends)
        deadline = time.monotonic() + LONG
        while not (folder / "socket").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (folder / "socket").exists()
        if end == "it is told to end":
            warm.terminate()
        else:
            os.close(lives)
        assert warm.wait(LONG) == 0
        assert not folder.exists()
    finally:
        warm.kill()
        warm.wait()


def test_killed_nodes_are_lost_and_the_quorum_decides(running, ended):
    # A round goes on when site 0 and three of the four free nodes have answered, and the grace time has passed.
    # Site 1 alone is no quorum, so site 0 is waited for, however busy the machine is.
    patience = {"quorum": 0.5, "free-part": 0.75, "grace": 5.0}
    running.run("faults", rule="all", rounds=2, warmup=0.0, **patience)
    running.wait_for(lambda: len(running.history("faults")) >= 1, what="round 1")
    running.kill("site-3")  # a free node and a priority node, while round 2 is under way
    running.kill("site-1")
    rounds, _ = running.finish("faults")
    assert [r.clients[0].decision for r in rounds] == ["trained"] * 2
    assert rounds[1].clients[2].decision == "admitted"  # without site 3, three of four are sites 2, 4 and 5
    assert rounds[1].clients[3].decision == "lost"
    # Site 1 carries 0.45 of the priority clients' weight: with a quorum of 0.5 the others went on, with 1 they wait.
    assert rounds[1].clients[1].decision == "lost"
    assert rounds[-1].test_accuracy is not None
    assert rounds[-1].train_loss is not None
    out = running.folder / "faults"
    running.wait_for(lambda: read_status(out).state == "finished", what="the report")
    assert (out / "report.html").exists()
    status = {client.name: client for client in read_status(out).clients}
    assert (status["site-3"].decision, status["site-3"].reason) == ("lost", rounds[1].clients[3].reason)
    assert status["site-3"].last_seen < status["site-2"].last_seen
    run = running.run("paused", rule="all", rounds=1, wait=1.0, timeout=30.0)
    running.wait_for(
        lambda: "paused before round 0" in running.flwr("log", run, "here", "--show").stdout, what="a pause"
    )
    status = read_status(running.folder / "paused")
    assert (status.state, status.quorum.missing) == ("paused", ("site-1",))
