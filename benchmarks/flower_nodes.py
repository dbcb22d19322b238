"""What many nodes cost the server: a real SuperLink and ServerApp, and nodes that are threads of this process.

    python benchmarks/flower_nodes.py [--nodes 10,100] [--parameters 100000] [--rounds 3] [--rule fedalign]

The nodes speak Flower's Fleet API over TLS, each with its own key and connection, and answer with FedALIGN's ClientApp.
Server seconds are CPU seconds of the SuperLink and the ServerApp; megabytes are the growth of their resident size, and
what they sent and received. All are divided by the number of nodes, and seconds also by the number of rounds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "flower"))
LONGEST = 900.0  # seconds for a number of nodes; how far it came is told then
_TASK = '''
"""Random samples of a linear task; the model's size is a setting of the benchmark."""
import torch
from fedalign.flower import ClientData

FEATURES = {features}

def model():
    return torch.nn.Linear(FEATURES, 10)

def data(node_config):
    draw = torch.Generator().manual_seed(int(node_config["partition-id"]))
    x = torch.randn(40, FEATURES, generator=draw)
    return ClientData(train=(x[:20], (x[:20, 0] > 0).long()), heldout=(x[20:], (x[20:, 0] > 0).long()))
'''


class Nodes:
    """Threads that are nodes: each fetches a message, answers it, and looks for the next one."""

    def __init__(self, federation: Any, names: list[str]) -> None:
        self._address, self._keys = f"127.0.0.1:{federation.port}", federation.keys
        self._stop, self._configs = threading.Event(), dict[int, Any]()
        self._one_at_a_time = threading.Lock()  # the work itself: a real node has a machine of its own
        self.errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(name, k), daemon=True) for k, name in enumerate(names)
        ]

    def __enter__(self) -> Nodes:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, name: str, number: int) -> None:
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
        from flwr.supernode.fleet_http_connection import http_request_response

        from fedalign.flower.polling import Paced, quicken_pulls, shortest_pause

        quicken_pulls()
        key: Any = load_ssh_private_key((self._keys / name).read_bytes(), None)
        certificates = (self._keys / "ca.crt").read_bytes()
        with http_request_response(self._address, False, certificates, (key, key.public_key())) as connection:
            # It looks again as often as a node of `fedalign flower node` does.
            pace = Paced(shortest_pause(os.environ.get("FEDALIGN_POLL")), sleep=self._stop.wait)
            while not self._stop.is_set():
                try:
                    if self._answer(connection, number):
                        pace.sleep(0.0)  # it has worked
                    else:
                        pace.sleep(3.0)
                except Exception as error:
                    self.errors.append(f"{name}: {type(error).__name__}: {error}"[:200])
                    self._stop.wait(2.0)

    def _answer(self, connection: Any, number: int) -> bool:
        from flwr.app import Context, RecordDict
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
        from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree

        from fedalign.flower.client_app import app

        node, receive, send, get_run, get_fab, pull_object, push_object, confirm = connection
        got = receive()
        if got is None:
            return False
        metadata, tree = got[0].metadata, got[1]
        run = metadata.run_id
        message = pull_and_inflate_object_from_tree(
            tree, lambda name: pull_object(run, name), lambda name: confirm(run, name)
        )
        message.metadata.__dict__["_message_id"] = metadata.message_id
        context = Context(run, node, {"partition-id": number}, RecordDict(), self._config(run, get_run, get_fab))
        with self._one_at_a_time:
            reply = app(message, context)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        missing, session = send(reply, get_object_tree(reply), 0.0)
        for name, part in get_all_nested_objects(reply).items():
            if name in missing:
                push_object(run, session, name, part.deflate())
        return True

    def _config(self, run: int, get_run: Any, get_fab: Any) -> Any:
        from flwr.common.config import get_fused_config_from_fab

        if run not in self._configs:
            told = get_run(run)
            self._configs[run] = get_fused_config_from_fab(get_fab(told.fab_hash, run).content, told)
        return self._configs[run]


class Cost:
    """CPU seconds and resident megabytes of the SuperLink and the processes that it started."""

    def __init__(self, federation: Any) -> None:
        self._root = federation.processes["superlink"].pid
        self.largest, self.seconds = 0.0, dict[int, float]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Cost:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.look()
            self._stop.wait(0.5)

    def look(self) -> float:
        """Note the present sizes, and return the CPU seconds so far."""
        from processes import descendants

        size = 0
        for number in [self._root, *descendants(self._root)]:
            try:
                words = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
                size += int(Path(f"/proc/{number}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            except OSError:  # it has ended meanwhile
                continue
            self.seconds[number] = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
        self.largest = max(self.largest, size / 1e6)
        return sum(self.seconds.values())


@contextmanager
def superlink(folder: Path, names: list[str], features: int) -> Iterator[Any]:
    """Start a SuperLink that knows these nodes, two of them priority nodes."""
    from flwr.proto.control_pb2 import RegisterNodeRequest
    from processes import Federation

    temporary = tempfile.mkdtemp(prefix="fa-")
    federation = Federation(folder, temporary, names, 2, {"my_federation/task.py": _TASK.format(features=features)})
    try:
        federation.superlink()
        with control(federation) as client:
            for name in names:
                key = (federation.keys / f"{name}.pub").read_bytes()
                client.RegisterNode(RegisterNodeRequest(public_key=pem(key), name=name))
        yield federation
    finally:
        for name in list(federation.processes):
            federation.kill(name)
        shutil.rmtree(temporary)


def control(federation: Any) -> Any:
    """Connect to the SuperLink's control API, as `flwr supernode register` does."""
    from flwr.supercore.control import ControlHttpClient

    return ControlHttpClient.from_server_address(
        f"127.0.0.1:{federation.port}", False, (federation.keys / "ca.crt").read_bytes(), interceptors=[]
    )


def pem(key: bytes) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    return load_ssh_public_key(key).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def measure(nodes: int, parameters: int, rounds: int, rule: str) -> str:
    """Run a federation and return a line about it."""
    names, features = [f"site-{k}" for k in range(nodes)], max(1, parameters // 10 - 1)
    with tempfile.TemporaryDirectory(prefix="fa-") as name, superlink(Path(name), names, features) as federation:
        sys.path.insert(0, str(federation.app))
        for module in [module for module in sys.modules if module.startswith("my_federation")]:
            del sys.modules[module]
        with Nodes(federation, names) as clients, Cost(federation) as cost:
            before, size = cost.look(), cost.largest
            began = time.monotonic()
            federation.run("run", rule=rule, rounds=rounds, warmup=0.0, epsilon=100.0, timeout=300.0, longest=0.0)
            while not (ended := (federation.folder / "run" / "model.safetensors").exists()):
                if time.monotonic() - began > LONGEST:
                    break
                time.sleep(0.3)
            seconds = time.monotonic() - began
            spent = cost.look() - before
            log = federation.folder / "run" / "rounds.jsonl"
            history = federation.history("run") if log.exists() else []
        sys.path.remove(str(federation.app))
    if not ended:
        return (
            f"{nodes:5} nodes, {parameters} parameters: {len(history)} of {rounds} rounds in {seconds:.0f} s; "
            f"server: {spent:.0f} s of CPU, {cost.largest:.0f} MB at most, {len(clients.errors)} errors"
        )
    admitted = min(record.admitted for record in history)  # all of them, unless it breaks
    return (
        f"{nodes:5} nodes, {parameters} parameters: {seconds / rounds:.1f} s a round, {admitted} free admitted; "
        f"server: {1000 * spent / rounds / nodes:.0f} ms of CPU a node and round, "
        f"{(cost.largest - size) / nodes:.2f} MB a node ({cost.largest:.0f} MB at most), {len(clients.errors)} errors"
    )


def main() -> None:
    """Measure each number of nodes and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="10,100", help="numbers of nodes, separated by commas")
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rule", default="fedalign")
    options = parser.parse_args()
    for nodes in map(int, options.nodes.split(",")):
        print(measure(nodes, options.parameters, options.rounds, options.rule), flush=True)


if __name__ == "__main__":
    main()
