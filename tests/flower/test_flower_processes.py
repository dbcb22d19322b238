"""Real SuperLink and SuperNode processes on the loopback address, with TLS and authenticated nodes."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedalign as fa
from fedalign.experiments.store import RunStore
from fedalign.flower.new_app import create
from fedalign.flower.roster_file import Entry, RosterFile, fingerprint

pytestmark = pytest.mark.processes  # some minutes: `make test-flower`
ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
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


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def descendants(number):
    """Give the numbers of the processes that one started, and those started in turn."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(words[1]), []).append(int(stat.parent.name))
    found = list(children.get(number, []))
    for child in found:  # grows while it is gone through
        found += children.get(child, [])
    return found


class Federation:
    """The processes of one federation; every one is ended by its number."""

    def __init__(self, folder, temporary):
        self.folder = folder
        self.keys, self.app = folder / "keys", folder / "my-federation"
        spec = importlib.util.spec_from_file_location("keys", ROOT / "examples" / "flower" / "keys.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.make(self.keys, "127.0.0.1", [*NODES, "stranger"])
        entries = (Entry(fingerprint((self.keys / f"{n}.pub").read_bytes()), n, n in NODES[:2]) for n in NODES)
        RosterFile(tuple(entries)).write(folder / "roster.toml")
        create(self.app)
        (self.app / "my_federation" / "task.py").write_text(TASK)
        (self.app / "mine.py").write_text(MINE)  # named as in an experiment: mine:Half
        (self.app / "my_federation" / "mine.py").write_text(MINE)
        self.port = free_port()
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": temporary,  # a node that is killed at once leaves its folder
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        (folder / "flwr").mkdir()
        (folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.keys / "ca.crt"}"\n'
        )
        self.processes = {}
        self.proxy = free_port() if NGINX else None

    def start(self, name, *command):
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / command[0]), *map(str, command[1:])],  # BIN / "/an/absolute/path" is that path
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
            )

    def kill(self, name):
        """End a process and those it started, at once."""
        process = self.processes.pop(name)
        for number in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.wait(20)

    def superlink(self):
        keys = self.keys
        self.start(
            "superlink", "flower-superlink", "--host", "127.0.0.1", "--port", self.port, "--ssl-certfile",
            keys / "server.crt", "--ssl-keyfile", keys / "server.key", "--ssl-ca-certfile", keys / "ca.crt",
            "--enable-supernode-auth", "--disable-runtime-dependency-installation", "--database",
            self.folder / "state.db",
        )  # fmt: skip
        self.wait_for(lambda: self.flwr("supernode", "list", "here", check=False).returncode == 0, 60)

    def nginx(self):
        """Start the reverse proxy of examples/flower, with this federation's folders and ports."""
        text = (ROOT / "examples" / "flower" / "nginx.conf").read_text()
        for old, new in (
            ("listen 9000", f"listen 127.0.0.1:{self.proxy}"),
            ("127.0.0.1:8000", f"127.0.0.1:{self.port}"),
            ("/etc/fedalign/", f"{self.keys}/"),
            ("/run/", f"{self.folder}/"),
            ("/var/log/", f"{self.folder}/"),
        ):
            assert old in text
            text = text.replace(old, new)
        (self.folder / "nginx.conf").write_text(text)
        self.start("nginx", NGINX, "-c", self.folder / "nginx.conf", "-p", self.folder, "-g", "daemon off;")

    def node(self, name, **config):
        config = {"partition-id": NODES.index(name) if name in NODES else 5, **config}
        port = self.proxy if self.proxy and name == "site-2" else self.port
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        self.start(
            name, "fedalign", "flower", "node", "--superlink", f"127.0.0.1:{port}", "--root-certificates",
            self.keys / "ca.crt", "--auth-supernode-private-key", self.keys / name, "--host", "127.0.0.1",
            "--port", free_port(), "--node-config", words,
        )  # fmt: skip

    def flwr(self, *words, check=True, timeout=60):
        done = subprocess.run(
            [str(BIN / "flwr"), *map(str, words)],
            env=self.environment, capture_output=True, text=True, timeout=timeout, cwd=self.folder,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def wait_for(self, condition, seconds, what="it"):
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"{what} did not happen in {seconds} s: {self.logs()}"
            time.sleep(0.3)

    def logs(self):
        return "\n".join(f"== {p.name}\n{p.read_text()[-1500:]}" for p in sorted(self.folder.glob("*.log")))

    def run(self, name, **settings):
        """Submit a run; its output goes to NAME. Gives its number."""
        settings = {
            "roster": str(self.folder / "roster.toml"), "out": str(self.folder / name), "rounds": 4, "warmup": 0.25,
            "epochs": 2, "batch-size": 20, "epsilon": 0.6, "trust": "report", "timeout": 60.0, **settings,
        }  # fmt: skip
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        said = json.loads(self.flwr("run", self.app, "here", "--run-config", words, "--format", "json").stdout)
        assert "run-id" in said, said
        return said["run-id"]

    def history(self, name):
        return RunStore(self.folder / name).history().rounds

    def finish(self, name, seconds=300):
        self.wait_for((self.folder / name / "model.safetensors").exists, seconds, f"the end of {name}")
        return self.history(name), load_file(self.folder / name / "model.safetensors")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    temporary = tempfile.mkdtemp(prefix="fa-")  # a short path: a socket's may have 107 characters
    federation = Federation(tmp_path_factory.mktemp("flower"), temporary)
    try:
        federation.superlink()
        if NGINX:
            federation.nginx()
        for name in NODES:
            federation.flwr("supernode", "register", federation.keys / f"{name}.pub", "here")
        for name in NODES:
            # It may say what it likes of itself.
            federation.node(name, **({"priority": True, "role": "priority"} if name == "site-5" else {}))
        yield federation
    finally:
        for name in list(federation.processes):
            federation.kill(name)
        shutil.rmtree(temporary)


@pytest.fixture(scope="module")
def ended(running):
    """AutoALIGN, with the server killed in round 3 of 4; an undisturbed run of FedALIGN; a user's own rule."""
    running.run("auto", rule="auto")
    running.wait_for(lambda: len(running.history("auto")) >= 2, 150, "round 2")
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
    running.wait_for(lambda: process.poll() is not None, 60, "the stranger's refusal")
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
        deadline = time.monotonic() + 60
        while not (folder / "socket").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (folder / "socket").exists()
        if end == "it is told to end":
            warm.terminate()
        else:
            os.close(lives)
        assert warm.wait(20) == 0
        assert not folder.exists()
    finally:
        warm.kill()
        warm.wait()


def test_killed_nodes_are_lost_and_the_quorum_decides(running, ended):
    running.run("faults", rule="all", rounds=2, warmup=0.0, timeout=15.0, quorum=0.4)
    running.wait_for(lambda: len(running.history("faults")) >= 1, 90, "round 1")
    running.kill("site-3")  # a free node and a priority node, while round 2 is under way
    running.kill("site-1")
    rounds, _ = running.finish("faults", 150)
    assert [r.clients[0].decision for r in rounds] == ["trained"] * 2
    assert [r.clients[2].decision for r in rounds] == ["admitted"] * 2
    assert rounds[1].clients[3].decision == "lost"
    # Site 1 carries half of the priority clients' weight: with a quorum of 0.4 the others went on, with 1 they wait.
    assert rounds[1].clients[1].decision == "lost"
    assert rounds[-1].test_accuracy is not None
    run = running.run("paused", rule="all", rounds=1, wait=1.0, timeout=15.0)
    running.wait_for(
        lambda: "paused before round 0" in running.flwr("log", run, "here", "--show").stdout, 60, "a pause"
    )
