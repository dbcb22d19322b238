"""Stands in for ``flwr-clientapp``: hands its command line to the node's warm process, or starts a process for it.

Flower runs it for every message, as a script without any package, so it imports little. The warm process acknowledges
what it takes on. If it has ended, or does not answer, a process of the usual kind runs the app.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

SOCKET = "warm/socket"  #: in the node's folder
TAKEN = b"1"  #: the acknowledgement
PATIENCE = 10.0  #: seconds to wait for it; nobody runs a command line whose sender has given up


def handed_over(address: str, words: Sequence[str]) -> bool:
    """Hand a command line over, and say whether the warm process has taken it on."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(address)
            connection.sendall("\0".join(words).encode())
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) == TAKEN
    except OSError:
        return False


def main(python: str, folder: str, words: Sequence[str]) -> None:
    """Hand the command line over, or become the process that runs it."""
    if not handed_over(f"{folder}/{SOCKET}", words):
        print("fedalign: the warm process did not answer; this message starts a process of its own", file=sys.stderr)
        sys.stderr.flush()
        os.execv(python, [python, "-m", "fedalign.flower.guard", folder, *words])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
