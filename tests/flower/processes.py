"""The processes of a federation: a SuperLink and SuperNodes on the loopback address, with TLS.

Tests wait for what they need (nodes that are connected and ready, a round, a file), with limits that only a process
that hangs can reach: the machine may have other work to do.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

from fedalign.experiments.store import RunStore
from fedalign.flower.new_app import create
from fedalign.flower.roster_file import Entry, RosterFile, fingerprint

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LONG = 300  #: seconds; nothing takes so long, also on a busy machine
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def proxy_config(folder, keys, listen, superlink):
    """Return examples/flower/nginx.conf with other folders and ports."""
    text = (ROOT / "examples" / "flower" / "nginx.conf").read_text()
    for old, new in (
        ("listen 9000", f"listen 127.0.0.1:{listen}"),
        ("127.0.0.1:8000", f"127.0.0.1:{superlink}"),
        ("/etc/fedalign/", f"{keys}/"),
        ("/run/", f"{folder}/"),
        ("/var/log/", f"{folder}/"),
    ):
        assert old in text
        text = text.replace(old, new)
    return text


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


def words_of(number):
    """Return the words of a process's command line; none if it has ended."""
    try:
        return set(Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0"))
    except OSError:
        return set()


class Federation:
    """The processes of one federation of sites, of which the first are priority clients; each is ended by its number.

    ``files`` are those of the app, by their path in it. With ``proxied``, that site connects through nginx.
    """

    def __init__(self, folder, temporary, sites, priority, files, proxied=None):
        self.folder, self.sites, self.proxied = folder, list(sites), proxied
        self.keys, self.app = folder / "keys", folder / "my-federation"
        spec = importlib.util.spec_from_file_location("keys", ROOT / "examples" / "flower" / "keys.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.make(self.keys, "127.0.0.1", [*self.sites, "stranger"])
        prints = [fingerprint((self.keys / f"{name}.pub").read_bytes()) for name in self.sites]
        entries = (Entry(key, self.sites[k], k < priority) for k, key in enumerate(prints))
        RosterFile(tuple(entries)).write(folder / "roster.toml")
        create(self.app)
        for name, text in files.items():
            (self.app / name).write_text(text)
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
        self.processes, self.began = {}, {}
        self.proxy = free_port() if NGINX and proxied else None

    def start(self, name, *command):
        with (self.folder / f"{name}.log").open("ab") as log:
            self.began[name] = log.tell()
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
        process.wait(LONG)

    def superlink(self):
        keys = self.keys
        self.start(
            "superlink", "flower-superlink", "--host", "127.0.0.1", "--port", self.port, "--ssl-certfile",
            keys / "server.crt", "--ssl-keyfile", keys / "server.key", "--ssl-ca-certfile", keys / "ca.crt",
            "--enable-supernode-auth", "--disable-runtime-dependency-installation", "--database",
            self.folder / "state.db",
        )  # fmt: skip
        self.wait_for(lambda: self.flwr("supernode", "list", "here", check=False).returncode == 0, what="the SuperLink")

    def nginx(self):
        """Start the reverse proxy of examples/flower, with this federation's folders and ports."""
        (self.folder / "nginx.conf").write_text(proxy_config(self.folder, self.keys, self.proxy, self.port))
        self.start("nginx", NGINX, "-c", self.folder / "nginx.conf", "-p", self.folder, "-g", "daemon off;")

    def node(self, name, **config):
        number = self.sites.index(name) if name in self.sites else len(self.sites) - 1
        config = {"partition-id": number, **config}
        port = self.proxy if self.proxy and name == self.proxied else self.port
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        self.start(
            name, "fedalign", "flower", "node", "--superlink", f"127.0.0.1:{port}", "--root-certificates",
            self.keys / "ca.crt", "--auth-supernode-private-key", self.keys / name, "--host", "127.0.0.1",
            "--port", free_port(), "--node-config", words,
        )  # fmt: skip

    def await_nodes(self, *names):
        """Wait until nodes are connected, and their warm processes ready to take messages on."""

        def ready(name):
            sockets = Path(self.environment["TMPDIR"]).glob("fedalign-node-*/warm/socket")
            folders = {str(path.parent).encode() for path in sockets}
            words = set().union(*map(words_of, descendants(self.processes[name].pid)))
            return "SuperNode ID" in self.said(name) and bool(folders & words)

        self.wait_for(lambda: all(map(ready, names)), LONG, f"the start of {', '.join(names)}")

    def said(self, name):
        """Return what a process has said since it was started last."""
        return (self.folder / f"{name}.log").read_bytes()[self.began[name] :].decode()

    def flwr(self, *words, check=True, timeout=LONG):
        done = subprocess.run(
            [str(BIN / "flwr"), *map(str, words)],
            env=self.environment, capture_output=True, text=True, timeout=timeout, cwd=self.folder,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def wait_for(self, condition, seconds=LONG, what="it"):
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
            "epochs": 2, "batch-size": 20, "epsilon": 0.6, "trust": "report", "timeout": float(LONG),
            "free-part": 1.0, "grace": float(LONG), **settings,
        }  # fmt: skip
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        said = json.loads(self.flwr("run", self.app, "here", "--run-config", words, "--format", "json").stdout)
        assert "run-id" in said, said
        return said["run-id"]

    def history(self, name):
        return RunStore(self.folder / name).history().rounds

    def finish(self, name, seconds=2 * LONG):
        self.wait_for((self.folder / name / "model.safetensors").exists, seconds, f"the end of {name}")
        return self.history(name), load_file(self.folder / name / "model.safetensors")


@contextlib.contextmanager
def started(folder, sites, priority, files, proxied=None, node_config=None, more=()):
    """Start a federation, with the node config of each site, and end its processes at the end.

    ``more`` are sites whose nodes the test starts.
    """
    temporary = tempfile.mkdtemp(prefix="fa-")  # a short path: a socket's may have 107 characters
    everyone = [*sites, *more]
    federation = Federation(folder, temporary, everyone, priority, files, proxied)
    try:
        federation.superlink()
        if federation.proxy:
            federation.nginx()
        for name in everyone:
            federation.flwr("supernode", "register", federation.keys / f"{name}.pub", "here")
        for name in sites:
            federation.node(name, **(node_config or {}).get(name, {}))
        federation.await_nodes(*sites)
        yield federation
    finally:
        for name in list(federation.processes):
            federation.kill(name)
        shutil.rmtree(temporary)
