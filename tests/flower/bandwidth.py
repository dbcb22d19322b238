"""How many bytes a round costs each client, with nodes in one process. Used by a test and by a benchmark.

Bytes are those of the objects that Flower sends for a message: its records, names and arrays. HTTP, TLS and the
requests without a message come on top.
"""

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedalign.experiments.store import RunStore
from fedalign.flower import ClientData
from fedalign.flower.local_grid import LocalGrid
from fedalign.flower.roster_file import Entry, RosterFile, fingerprint
from fedalign.flower.server_app import Server
from fedalign.flower.settings import Settings

FEATURES, CLASSES = 784, 10
PRIORITY, NODES = 2, 4
WIDTH = {"parameters": 1_000_000}  # of the model; a function of an app takes no arguments


def model():
    """Make a network with about so many parameters."""
    hidden = max(1, (WIDTH["parameters"] - CLASSES) // (FEATURES + CLASSES + 1))
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, CLASSES))


@functools.cache
def _task():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(CLASSES, FEATURES, generator=draw)


def data(node_config):
    """Return noisy samples around a centre for each class, as images of one class are alike; the same for all nodes."""
    draw = torch.Generator().manual_seed(1 + int(node_config["partition-id"]))
    y = torch.randint(0, CLASSES, (120,), generator=draw)
    x = _task()[y] + 3 * torch.randn(120, FEATURES, generator=draw)
    return ClientData((x[:80], y[:80]), (x[80:100], y[80:100]), (x[100:], y[100:]))


@dataclass
class Traffic:
    """The bytes and models of a round, by node."""

    down: dict[int, int] = field(default_factory=dict)
    up: dict[int, int] = field(default_factory=dict)
    models: dict[int, int] = field(default_factory=dict)
    messages: dict[int, int] = field(default_factory=dict)

    def add(self, node, message, reply):
        """Count a message and its reply."""
        self.down[node] = self.down.get(node, 0) + _bytes(message)
        self.up[node] = self.up.get(node, 0) + _bytes(reply)
        self.messages[node] = self.messages.get(node, 0) + 1
        if "models" in message.content:
            self.models[node] = self.models.get(node, 0) + sum(message.content["models"]["sent"])


def _bytes(message):
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())


def measure(rounds=4, parameters=1_000_000, priority=PRIORITY, nodes=NODES, **settings):
    """Run a federation, of two priority and two free nodes; gives the traffic of every round, and the records.

    A round is from one training to the next: the model that the measuring at its end brings is that of the next round.
    """
    WIDTH["parameters"] = parameters
    found = [Traffic()]
    with tempfile.TemporaryDirectory(prefix="fa-") as name:
        folder = Path(name)
        config = {
            "model": f"{__name__}:model", "data": f"{__name__}:data", "roster": str(folder / "roster.toml"),
            "out": str(folder / "out"), "rounds": rounds, "warmup": 0.0, "epsilon": 5.0, "epochs": 1, "batch-size": 20,
            "lr": 0.02, "trust": "report", "wait": 0.0, **settings,
        }  # fmt: skip

        def answer(node, message, honest):
            if message.metadata.message_type == "train" and node == 1:
                round_ = int(message.content["task"]["round"])
                while len(found) <= round_:
                    found.append(Traffic())
            reply = honest()
            found[-1].add(node, message, reply)
            return reply

        configs = {k: {"partition-id": k - 1, "cache-mb": 4096} for k in range(1, nodes + 1)}
        grid = LocalGrid(configs, config, answer=answer)
        entries = (Entry(fingerprint(key), f"site-{k}", k <= priority) for k, key in grid.keys.items())
        RosterFile(tuple(entries)).write(folder / "roster.toml")
        Server(grid, Settings.read(config), run_id=1).run()
        return found, RunStore(folder / "out").history().rounds
