"""``fedalign report --serve``: the report of runs as they are now, on an address of this machine only.

The server reads the runs' folders and writes nothing. It answers two paths: the page, and its data, which the page asks
for again and again; a report may have more of them. Requests under another host name are refused, so that a web page
that the reader happens to have open cannot read the runs through a name that it controls.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from fedalign.errors import FedalignError
from fedalign.report.follow import FollowedRun
from fedalign.report.page import render_page, render_parts
from fedalign.report.page_data import packed, page_data
from fedalign.report.read_runs import RunFolder
from fedalign.report.sections import rounds_done

HOST = "127.0.0.1"
_PAUSE = 2.0  # seconds between two questions of the page
_SHARE = 0.1  # of a core's time that answering may take, so that it does not slow the run down


@dataclass(frozen=True)
class Answer:
    """What the server sends: ``tag`` names the state of the folders, ``pause`` is when to ask again."""

    body: bytes
    tag: str
    pause: float


class LiveReport:
    """The report of some runs, rendered anew only if their folders have changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._runs = [FollowedRun(folder) for folder in folders]
        self._lock = Lock()
        self._data: Answer | None = None

    def page(self) -> bytes:
        """Render the page of the runs as they are now."""
        with self._lock:
            runs = [run.read() for run in self._runs]
            return render_page(runs, live=True, status=_status(runs), above=self.above()).encode()

    def above(self) -> str:
        """Return HTML that the page shows above the report; nothing here."""
        return ""

    def more(self) -> Mapping[str, Callable[[], tuple[bytes, str]]]:
        """Return further paths, each with what gives its body and its type; none here."""
        return {}

    def data(self) -> Answer:
        """Render what the page needs to bring itself up to date, or return the last answer if nothing has changed."""
        with self._lock:
            tag = sha256(repr([run.mark() for run in self._runs]).encode()).hexdigest()[:24]
            if self._data is None or self._data.tag != tag:
                began = time.process_time()
                runs = [run.read() for run in self._runs]
                content = {"data": packed(page_data(runs)), "html": render_parts(runs), "status": _status(runs)}
                body = json.dumps(content).encode()
                self._data = Answer(body, tag, max(_PAUSE, (time.process_time() - began) / _SHARE))
            return self._data


class ReportServer(ThreadingHTTPServer):
    """Serves a :class:`LiveReport`; port 0 takes a free port."""

    daemon_threads = True

    def __init__(self, report: LiveReport, port: int = 0) -> None:
        self.report = report
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise FedalignError(f"cannot listen on {HOST}, port {port}: {error.strerror}") from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that has gone before its answer came; anything else is printed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        return f"http://{HOST}:{self.server_address[1]}/"

    @property
    def own_names(self) -> set[str]:
        """The values of the Host header that mean this server."""
        port = self.server_address[1]
        return {f"{name}:{port}" for name in (HOST, "localhost")}


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version = "fedalign"
    sys_version = ""

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.own_names:
            self._send(403, b"this server answers to its own address only\n", "text/plain; charset=utf-8")
            return
        path = self.path.partition("?")[0]
        try:
            if path == "/":
                self._send(200, self.server.report.page(), "text/html; charset=utf-8")
            elif path == "/data":
                self._send_data(self.server.report.data())
            elif path in (more := self.server.report.more()):
                self._send(200, *more[path]())
            else:
                known = ", ".join(["/", *more])
                self._send(404, f"there is only {known} here\n".encode(), "text/plain; charset=utf-8")
        except FedalignError as error:
            self._send(500, f"{error}\n".encode(), "text/plain; charset=utf-8")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: a line for every question of the page would bury the address."""

    def _send_data(self, answer: Answer) -> None:
        more = {"ETag": f'"{answer.tag}"', "X-Pause": f"{answer.pause:.1f}"}
        if self.headers.get("If-None-Match") == more["ETag"]:
            self._send(304, b"", "application/json", more)
        else:
            self._send(200, answer.body, "application/json", more)

    def _send(self, status: int, body: bytes, kind: str, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        for name, value in {**headers, "X-Content-Type-Options": "nosniff", **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _status(runs: Sequence[RunFolder]) -> str:
    """Say how far the runs are."""
    said = []
    for run in runs:
        done, total = rounds_done(run), run.settings["rounds"]
        said.append(f"{run.name}: {f'round {done} of {total}' if 'unfinished' in run.summary else 'finished'}")
    return "Live. " + "; ".join(said)
