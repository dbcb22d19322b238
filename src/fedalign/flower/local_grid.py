"""A Flower Grid whose nodes are in this process: many clients at once, for tests and benchmarks of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedalign.errors import FedalignError
from fedalign.flower.client_app import app as client_app

App = Callable[[Message, Context], Message]
#: Gets a node's number, the message to it and a function that answers it honestly; gives what the node sends, or None.
Answer = Callable[[int, Message, Callable[[], Message]], Any]


def honest(node: int, message: Message, answer: Callable[[], Message]) -> Message:
    """Answer as the ClientApp does."""
    return answer()


@dataclass
class LocalGrid(Grid):
    """Nodes in this process. Messages are answered when they are sent, and replies wait until they are pulled.

    ``nodes`` has the node config of each node, by its number. ``answer`` may send something else than the ClientApp's
    answer. ``keys`` are the public keys, which the roster needs.

    >>> grid = LocalGrid({1: {"partition-id": 0}}, {})
    >>> [node.node_id for node in grid.get_nodes()]
    [1]
    """

    nodes: Mapping[int, Mapping[str, Any]]
    run_config: Mapping[str, Any]
    app: App = client_app
    answer: Answer = honest
    keys: Mapping[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = self.keys or {node: public_key() for node in self.nodes}
        self._replies: dict[str, Any] = {}
        self._sent = 0
        for part in ("task", "run", "node"):  # which Flower sets in a ServerApp's process; a message needs them
            setattr(TaskIdentity, f"_{part}_id", 1)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return all nodes, with their public keys."""
        return [NodeInfo(node_id=node, public_key=self.keys[node]) for node in self.nodes]

    def get_node_ids(self) -> Iterable[int]:
        """Return the numbers of all nodes."""
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let the nodes answer messages, and return the numbers of the messages."""
        numbers = []
        for message in messages:
            self._sent += 1
            number = f"message-{self._sent}"
            message.metadata.__dict__["_message_id"] = number
            reply = self._reply(message)
            if reply is not None:
                self._replies[number] = reply
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages, each once."""
        return [self._replies.pop(number) for number in message_ids if number in self._replies]

    def _reply(self, message: Message) -> Any:
        node = message.metadata.dst_node_id

        def answer() -> Message:
            context = Context(1, node, dict(self.nodes[node]), RecordDict(), dict(self.run_config))
            return self.app(message, context)

        try:
            return self.answer(node, message, answer)
        except FedalignError as error:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)

    def _unused(self, *arguments: object, **options: object) -> NoReturn:
        raise NotImplementedError("FedALIGN's server does not use it")

    set_run = create_message = send_and_receive = _unused
    run = property(_unused)


def public_key() -> bytes:
    """Return the public key of a new node, in the PEM format."""
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
