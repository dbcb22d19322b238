"""The log that a node's owner keeps: a JSON line for everything that the node was asked, and what it did."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.monitoring.rotation import files, held, rotate

LARGEST, KEEP = 1 << 20, 10  #: bytes of a file of the log, and how many older files are kept
_YOUNGEST = 2 * 86_400.0  # seconds: rounds-a-day counts the lines of a day, however many there are


class NodeLog:
    """A file of JSON lines on the node's machine. Without a path nothing is written, and there are no lines to read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = NodeLog(Path(folder) / "node.jsonl")
    ...     log.add(run=7, asked="train", round=3, trained=True)
    ...     [(line["run"], line["round"]) for line in log.lines()]
    [('7', 3)]
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def add(self, *, run: int, asked: str, **values: Any) -> None:
        """Write a line: the time, the run, the type of the message, and what came of it."""
        if self.path is None:
            return
        line = {"time": round(time.time(), 3), "run": str(run), "asked": asked, **values}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with held(self.path):  # every message has a process of its own
            rotate(self.path, largest=LARGEST, keep=KEEP, youngest=_YOUNGEST)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(descriptor, (json.dumps(line) + "\n").encode())  # in one piece: a kill leaves no half line
            finally:
                os.close(descriptor)

    def lines(self, since: float = 0.0) -> Iterator[dict[str, Any]]:
        """Read the lines, oldest first; older files that end before ``since`` are left out.

        Raises :class:`FedalignError` for a line that is damaged.
        """
        if self.path is None or not self.path.parent.is_dir():
            return
        with contextlib.ExitStack() as stack:
            with held(self.path):  # an open file keeps its content when it is rotated
                found = [(path, path.open(encoding="utf-8", errors="replace")) for path in files(self.path, since)]
            for _, file in found:
                stack.enter_context(file)
            for path, file in found:
                yield from _read(path, file)


def _read(path: Path, texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            line["time"] = float(line["time"])
            line["run"] = str(line.get("run", ""))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FedalignError(f"{path} has a damaged line, number {number}: {error}") from error
        yield line
