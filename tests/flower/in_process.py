"""A federation over Flower's messages in one process: a Grid that calls the ClientApp directly, and fixtures for it.

A test module takes the fixtures with ``federation, keys = in_process.federation, in_process.keys``.
"""

import types

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

import fedalign as fa
from fedalign.data.synth import Synth
from fedalign.experiments.store import RunStore
from fedalign.flower import ClientData
from fedalign.flower.client_app import app as client_app
from fedalign.flower.roster_file import Entry, RosterFile, fingerprint
from fedalign.flower.server_app import Server
from fedalign.flower.settings import Settings

DATA = Synth(priority=2, free=4, samples=60, test_samples=60)


def model():
    return torch.nn.Linear(60, 10)


def arrays_of(federation, k):
    client, pool = federation.clients[k], federation.pool
    return {split: (pool.x[client.rows(split)], pool.y[client.rows(split)]) for split in ("train", "heldout", "test")}


def data(node_config):
    parts = arrays_of(DATA.federation(seed=0), int(node_config["partition-id"]))
    if not node_config.get("heldout", True):
        parts |= {"heldout": None, "heldout_fraction": 0.0}
    return ClientData(**parts)


def public_keys(count):
    """Make keys of nodes."""
    made = [ec.generate_private_key(ec.SECP384R1()).public_key() for _ in range(count)]
    return [k.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo) for k in made]


@pytest.fixture(scope="module")
def keys():
    return public_keys(7)


class FakeTimer:
    """A clock that stands still but for those who wait."""

    def __init__(self):
        self.time = 1000.0

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds


class Here(Grid):
    """A Grid whose nodes are in this process.

    ``tamper`` changes what a node answers, by its number; ``apps`` has the ClientApps of nodes that run another one.
    ``delays`` gives the seconds, on the ``timer``, that a node needs for a type of message.
    """

    def __init__(self, keys, nodes, run_config):
        self.keys, self.nodes, self.run_config = keys, dict(nodes), run_config
        self.tamper, self.apps, self.replies, self.sent = {}, {}, {}, []
        self.delays, self.timer = {}, FakeTimer()

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def get_nodes(self):
        return [types.SimpleNamespace(node_id=100 + k, public_key=self.keys[k]) for k in self.nodes]

    def push_messages(self, messages):
        ids = []
        for message in messages:
            number = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            ids.append(number)
            k = message.metadata.dst_node_id - 100
            reply = self._answer(k, message)
            if reply is not None:
                delay = self.delays.get((k, message.metadata.message_type), 0.0)
                self.replies[number] = self.timer.now() + delay, reply
        return ids

    def pull_messages(self, message_ids):
        now = self.timer.now()
        return [self.replies.pop(i)[1] for i in message_ids if i in self.replies and self.replies[i][0] <= now]

    def _answer(self, k, message):
        if k not in self.nodes:
            return Message(Error(5, "Node unavailable"), reply_to=message)
        context = Context(1, 100 + k, self.nodes[k], RecordDict(), self.run_config)
        try:
            reply = self.apps.get(k, client_app)(message, context)
        except fa.FedalignError as error:
            return Message(Error(2, str(error)), reply_to=message)
        return self.tamper[k](reply, message) if k in self.tamper else reply


@pytest.fixture
def federation(tmp_path, keys, monkeypatch):
    """Give a function that makes a server and its grid of six nodes, with other settings where wanted."""
    for name in ("task", "run", "node"):  # which Flower sets in a ServerApp's process
        monkeypatch.setattr(TaskIdentity, f"_{name}_id", 1)
    monkeypatch.setattr("fedalign.report.page.gallery", lambda run: [])  # drawing takes longer than the runs
    entries = tuple(Entry(fingerprint(keys[k]), f"site-{k}", k < 2) for k in range(6))
    RosterFile(entries).write(tmp_path / "roster.toml")

    def make(nodes=None, **settings):
        config = {
            "model": "in_process:model",
            "data": "in_process:data",
            "roster": str(tmp_path / "roster.toml"),
            "out": str(tmp_path / "out"),
            "rounds": 5,
            "epochs": 2,
            "batch-size": 20,
            "epsilon": 0.6,
            "trust": "report",  # most tests are about what a rule itself decides
            "wait": 0.0,
            "timeout": 0.3,
            "repeats": 0,
            "compress": False,  # most tests look at the arrays of messages
            "cache": False,
            **{key if "." in key else key.replace("_", "-"): value for key, value in settings.items()},
        }
        config = {key: value for key, value in config.items() if value is not None}
        grid = Here(keys, nodes or {k: {"partition-id": k} for k in range(6)}, config)
        return grid, lambda timer=None: Server(grid, Settings.read(config), run_id=1, timer=timer)

    return make


def history(tmp_path, name="out"):
    return RunStore(tmp_path / name).history().rounds


def weights(tmp_path, name="out"):
    return load_file(tmp_path / name / "model.safetensors")
