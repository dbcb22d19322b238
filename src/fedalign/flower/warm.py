"""A process that has imported Flower and PyTorch, and forks for every message.

Flower starts a process for every message, `flwr-clientapp`. It imports Flower and PyTorch before it reads the message,
which takes about three seconds of a core. Here one process imports them once: the isolation is the same, and the start
takes milliseconds. Flower finds its command on PATH, where a small script with the same name comes first
(``hand_over.py``).
"""

from __future__ import annotations

import gc
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

from fedalign.flower.guard import run_app
from fedalign.flower.hand_over import PATIENCE, TAKEN


def serve(folder: Path, ends: int) -> None:
    """Fork for every command line received, until the pipe ``ends`` is closed; then remove ``folder``.

    The socket is in ``folder``, which is in the node's own.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the folder is removed then, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the SuperNode
    try:
        _fork_for_each(folder, ends)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fork_for_each(folder: Path, ends: int) -> None:
    import flwr.supernode.cli  # noqa: F401

    import fedalign.flower.client_app  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a child's exit status is not needed: its reply tells
    gc.freeze()  # children share these pages
    address = folder / "socket"
    address.unlink(missing_ok=True)  # of a warm process that was killed
    with socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as ready:
        server.bind(str(address))
        server.listen(64)
        ready.register(server, selectors.EVENT_READ)
        ready.register(ends, selectors.EVENT_READ)
        while all(key.fileobj is server for key, _ in ready.select()):
            try:
                connection, _ = server.accept()
                with connection:
                    child = os.fork()
                    if child == 0:
                        server.close()
                        os.close(ends)
                        _take_on(folder.parent, connection)
            except OSError as error:  # too many files or processes: the sender finds another way
                print(f"fedalign: a message cannot be taken on: {error}", file=sys.stderr)
                time.sleep(0.1)


def _take_on(folder: Path, connection: socket.socket) -> None:
    """Read a command line, acknowledge it and run it, in the child.

    A peer that sends nothing occupies a child for some seconds and nobody else. A command line whose sender has given
    up is not run: the sender has started another process.
    """
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        connection.settimeout(PATIENCE)
        with connection, connection.makefile("rb") as file:
            words = file.read().decode().split("\0")
            connection.sendall(TAKEN)
    except OSError:
        os._exit(0)
    run_app(folder, words)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
