"""Writes ``summary.json`` and the report of a run over Flower at its end, as experiments do."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from fedalign.callbacks import Callback
from fedalign.errors import FedalignError
from fedalign.experiments.resume import earlier_seconds
from fedalign.experiments.store import write_atomically
from fedalign.report.page import write_report
from fedalign.report.read_runs import read_run

log = logging.getLogger("flwr")


class RunReport(Callback):
    """Summarises a run into its folder and draws its report. If that fails it is reported, and the run stays whole."""

    needs_model = False

    def __init__(self, folder: Path) -> None:
        self._folder, self._began = folder, time.monotonic()

    def on_end(self, result: Any) -> None:
        """Write both, from what the folder holds by now."""
        path = self._folder / "summary.json"
        try:
            seconds = earlier_seconds(self._folder) + time.monotonic() - self._began
            path.unlink(missing_ok=True)  # that of the run before it was extended
            summary = {key: value for key, value in read_run(self._folder).summary.items() if key != "unfinished"}
            arms = summary.pop("arms")
            summary |= {"seconds": round(seconds, 3), "arms": arms}
            write_atomically(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
            log.info("the report is %s", write_report([read_run(self._folder)], self._folder).page)
        except (FedalignError, OSError) as error:
            log.warning("the report was not written: %s; try again with: fedalign report %s", error, self._folder)
