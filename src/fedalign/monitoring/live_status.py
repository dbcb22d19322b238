"""The page of a federation: its status above the live view of its report, and what Prometheus reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from threading import Lock
from typing import Any

from markupsafe import Markup

from fedalign.experiments.store import RunStore
from fedalign.monitoring import audit
from fedalign.monitoring.prometheus import CONTENT_TYPE, exposition
from fedalign.monitoring.status import read_status
from fedalign.monitoring.words import HEADINGS, client_row, sentences
from fedalign.report.follow import Log
from fedalign.report.page import environment
from fedalign.report.serve import LiveReport

_EVENTS = 50  # the newest ones, which the page shows


class LiveStatus(LiveReport):
    """The live report of a run over Flower with the federation's status above it.

    Raises :class:`FedalignError` if the folder holds no such run.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__([folder])
        self.folder = folder
        self._log, self._log_lock = Log(RunStore(folder).log), Lock()
        read_status(folder)

    def above(self) -> str:
        """Render the status with the script that asks for it again."""
        page = environment().get_template("federation.html.j2")
        return page.render(**self._values(), script=_script())

    def more(self) -> Mapping[str, Callable[[], tuple[bytes, str]]]:
        """Return the paths of the status as HTML, as JSON, and for Prometheus."""
        return {
            "/federation": lambda: (self._fragment(), "text/html; charset=utf-8"),
            "/status.json": lambda: (read_status(self.folder).as_seen(time.time()).encode(), "application/json"),
            "/metrics": lambda: (self.metrics(), CONTENT_TYPE),
        }

    def metrics(self) -> bytes:
        """Return what Prometheus reads."""
        with self._log_lock:
            self._log.read()
            rounds = list(self._log.rounds)
        return exposition(read_status(self.folder), rounds, time.time())

    def _fragment(self) -> bytes:
        return environment().get_template("federation_status.html.j2").render(**self._values()).encode()

    def _values(self) -> dict[str, Any]:
        status, now = read_status(self.folder), time.time()
        newest = reversed(audit.read(self.folder, _EVENTS))
        return {
            "state": status.state_at(now),
            "sentences": sentences(status, now, str(self.folder)),
            "client_headings": list(HEADINGS),
            "clients": [{"cells": client_row(client, now), "best": False} for client in status.clients],
            "event_headings": list(audit.HEADINGS),
            "events": [{"cells": audit.event_row(event), "best": False} for event in newest],
        }


def _script() -> Markup:
    path = resources.files("fedalign.report") / "assets" / "page" / "federation.js"
    return Markup(path.read_text(encoding="utf-8"))
