"""A SuperNode whose ClientApp processes start warm.

Flower starts a process for every message, `flwr-clientapp`. It imports Flower and PyTorch before it reads the message,
which takes about three seconds of a core. Here one process imports them once and then forks for every message: the
isolation is the same, and the start takes milliseconds. Flower finds its command on PATH. So a small script with the
same name, first on PATH, passes the command line on. Flower itself is not changed.
"""

from __future__ import annotations

import gc
import os
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from fedalign.errors import FedalignError

_COMMAND = "flwr-clientapp"
# Runs for every message, so it imports little. If the warm process has ended, the usual command runs.
_HAND_OVER = """import os, socket, sys
try:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect({address!r})
        server.sendall("\\0".join(sys.argv[1:]).encode())
except OSError:
    os.execv({usual!r}, [{usual!r}, *sys.argv[1:]])
"""


def node(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by ``flower-supernode`` with these arguments, and start a warm process that ends with it."""
    commands = Path(sys.executable).parent  # of this environment, whether it is activated or not
    supernode, usual = commands / "flower-supernode", commands / _COMMAND
    if not supernode.exists():
        raise FedalignError(f"there is no flower-supernode in {commands}: pip install 'fedalign[flower]'")
    folder = Path(tempfile.mkdtemp(prefix="fedalign-node-"))  # for its owner alone: messages have a secret token
    hand_over, script = folder / "hand_over.py", folder / _COMMAND
    hand_over.write_text(_HAND_OVER.format(address=str(folder / "socket"), usual=str(usual)))
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(str(hand_over))} "$@"\n')
    script.chmod(0o700)
    ends, lives = os.pipe()
    subprocess.Popen([sys.executable, "-m", "fedalign.flower.warm", str(folder), str(ends)], pass_fds=[ends])
    os.close(ends)
    os.set_inheritable(lives, True)  # closed when the SuperNode ends, for any reason: that ends the warm process
    os.environ["PATH"] = os.pathsep.join([str(folder), str(commands), os.environ.get("PATH", os.defpath)])
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.25")  # Flower's default is a second per message
    os.execv(supernode, [str(supernode), *arguments])


def serve(folder: Path, ends: int) -> None:
    """Fork for every command line received, until the SuperNode ends; then remove ``folder``."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the folder is removed then, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the SuperNode
    try:
        _fork_for_each(folder / "socket", ends)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fork_for_each(address: Path, ends: int) -> None:
    from flwr.supernode.cli import flwr_clientapp

    import fedalign.flower.client_app  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a child's exit status is not needed: its reply tells
    gc.freeze()  # children share these pages
    with socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as ready:
        server.bind(str(address))
        server.listen(64)
        ready.register(server, selectors.EVENT_READ)
        ready.register(ends, selectors.EVENT_READ)
        while all(key.fileobj is server for key, _ in ready.select()):
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as file:
                words = file.read().decode().split("\0")
            if os.fork() == 0:
                server.close()
                os.close(ends)
                _run(flwr_clientapp, words)


def _run(main: Callable[[], None], words: Sequence[str]) -> NoReturn:
    """Run the command in the child, and exit without the parent's cleanup."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [_COMMAND, *words]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
