"""Keeps a node's processes: the SuperNode, and a warm process that is started again when it dies.

It runs as a script without any package, so that it stays small. It ends when the SuperNode does, with its exit code,
and passes signals on to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

NEEDED = ("flwr-clientapp", "node-config.json")  #: the files of a node's folder
_LOOK = 3600.0  # seconds after which it looks at its files again; the end of a child is noticed at once
_SHORTEST, _LONGEST = 1.0, 60.0  # seconds until a warm process that died is started again


class WarmProcess:
    """The warm process of a node. One that dies at once is started again after a pause that grows."""

    def __init__(self, python: str, folder: Path) -> None:
        self._python, self._folder = python, folder
        self._ends, self._lives = os.pipe()  # closed when this process ends, for any reason: that ends the warm one
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._due = 0.0
        self._pause = _SHORTEST

    def keep(self) -> float:
        """Start the process if it is due, and return the seconds after which to ask again."""
        now = time.monotonic()
        if self._process is not None and self._process.poll() is not None:
            self._pause = min(_LONGEST, 2 * self._pause) if now - self._started < _LONGEST else _SHORTEST
            self._due = now + self._pause
            _say(f"the warm process ended ({self._process.returncode}) and is started again in {self._pause:g} s")
            self._process = None
        if self._process is not None:
            return _LOOK
        if now < self._due:
            return self._due - now
        folder = self._folder / "warm"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [self._python, "-m", "fedalign.flower.warm", str(folder), str(self._ends)], pass_fds=[self._ends]
        )
        self._started = now
        return _LOOK

    def end(self) -> None:
        """End the process; what it forked for messages ends by itself."""
        os.close(self._lives)
        if self._process is not None:
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def supervise(python: str, folder: Path, arguments: Sequence[str]) -> int:
    """Run a node to its end and return the SuperNode's exit code; ``folder`` is removed then."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # on Linux: the SuperNode ends if this process is killed
    supernode = subprocess.Popen(
        [python, "-m", "fedalign.flower.supernode", *arguments],
        process_group=0,  # Ctrl-C in the terminal comes once, from here
        preexec_fn=(lambda: prctl(1, signal.SIGTERM)) if prctl is not None else None,
    )

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            supernode.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, pass_on)
    warm = WarmProcess(python, folder)
    try:
        while supernode.poll() is None:
            pause = warm.keep()
            if select.select([woken], [], [], pause)[0]:
                os.read(woken, 4096)
            if not _refreshed(folder):
                _say(f"{folder} is gone, without which the owner's limits do not hold: the node ends")
                supernode.terminate()
                supernode.wait()
    finally:
        supernode.terminate()
        warm.end()
        shutil.rmtree(folder, ignore_errors=True)
    code = supernode.wait()
    return code if code >= 0 else 128 - code


def _refreshed(folder: Path) -> bool:
    """Make a folder's files young again, because systems remove old temporary files; False if one is gone."""
    try:
        for name in (".", *NEEDED):
            os.utime(folder / name)
    except FileNotFoundError:
        return False
    return True


def _say(sentence: str) -> None:
    print(f"fedalign: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
