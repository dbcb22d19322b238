"""Real processes: `stop.sh` and `start.sh` of examples/flower, one at once after the other."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import BIN, LONG, ROOT, descendants, words_of

pytestmark = pytest.mark.processes
NAMES = ["superlink", "site-0", "site-1", "site-2", "site-3"]


def free_ports(number):
    """Return the first of some free ports in a row."""
    for first in range(20_000, 60_000, 10):
        with ExitStack() as opened:
            try:
                for port in range(first, first + number):
                    opened.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:  # somebody has it
                continue
            return first
    raise AssertionError("no free ports")


class Example:
    """A federation that the scripts start and stop."""

    def __init__(self, folder):
        self.folder = folder / "federation"
        self.environment = {
            **os.environ,
            "PORT": str(free_ports(len(NAMES))),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }

    def __call__(self, *command):
        return subprocess.run(
            [str(word) for word in command],
            env=self.environment, capture_output=True, text=True, timeout=2 * LONG,
        )  # fmt: skip

    def script(self, name):
        return self(ROOT / "examples" / "flower" / name, self.folder)

    def number(self, name):
        return int((self.folder / "logs" / f"{name}.pid").read_text())

    def is_running(self, name):
        return bool(words_of(self.number(name)))  # an ended process has no words

    def online(self):
        listed = self(BIN / "flwr", "supernode", "list", "here")
        return listed.stdout.count("online")


@pytest.fixture
def example():
    folder = Path(tempfile.mkdtemp(prefix="fa-"))  # a short path: a socket's may have 107 characters
    made = Example(folder)
    try:
        started = made.script("start.sh")
        assert started.returncode == 0, started.stdout + started.stderr
        yield made
    finally:
        made.script("stop.sh")
        shutil.rmtree(folder, ignore_errors=True)


def test_stop_and_start_at_once_leave_a_federation_that_runs(example):
    before = [example.number(name) for name in NAMES]
    refused = example.script("start.sh")  # the first is still there
    assert refused.returncode == 2
    assert "still runs" in refused.stderr
    assert [example.number(name) for name in NAMES] == before

    stopped = example.script("stop.sh")
    again = example.script("start.sh")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert [f"stopped {name}" in stopped.stdout for name in NAMES] == [True] * 5, stopped.stdout
    assert again.returncode == 0, again.stdout + again.stderr
    assert "The federation runs" in again.stdout
    after = [example.number(name) for name in NAMES]
    assert not set(before) & set(after)
    assert all(example.is_running(name) for name in NAMES)
    assert example.online() == 4

    # Nodes that are killed cannot sign off. The SuperLink refuses their successors for a while, and start.sh says so.
    for name in NAMES[1:3]:
        for number in [example.number(name), *descendants(example.number(name))]:
            os.kill(number, signal.SIGKILL)
    stopped = example.script("stop.sh")
    again = example.script("start.sh")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert again.returncode == 0, again.stdout + again.stderr
    logs = {name: (example.folder / "logs" / f"{name}.log").read_text() for name in NAMES[1:]}
    assert all("SuperNode ID" in text for text in logs.values())
    for line in again.stdout.splitlines()[:-3]:  # the last ones say what to do next
        assert line.startswith("waiting for site-") or "keys" in line, line
    assert example.online() == 4

    settings = f'roster="{example.folder / "roster.toml"}" out="{example.folder / "out"}" rounds=1'
    ran = example(
        BIN / "flwr", "run", example.folder / "my-federation", "here", "--stream", "--run-config", settings
    )  # the app's own SuperLink, here, is in FLWR_HOME
    assert (example.folder / "out" / "model.safetensors").exists(), ran.stdout + ran.stderr
