"""How a node declines: an error reply with a code of its own, which FedALIGN's server records as a decline.

Any other server sees an error with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import Error, Message

from fedalign.protocol.messages import Lost

DECLINED = 1019  #: Flower's own error codes are small numbers


@dataclass(frozen=True)
class NotWilling(Lost):
    """The node's owner does not want this; ``reason`` says why. There is no measure of the model."""


def decline(message: Message, reason: str) -> Message:
    """Return the reply with which a node declines a message, as in ``decline(message, "opted out")``."""
    return Message(Error(DECLINED, reason), reply_to=message)
