"""The tracker that writes runs of MLflow."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedalign.callbacks import RunInfo, Stopped
from fedalign.errors import DivergedError, FedalignError
from fedalign.experiments.store import write_atomically
from fedalign.protocol.records import RoundRecord
from fedalign.tracking.tracker import (
    Tracker,
    curves_of,
    decision_table,
    model_file,
    outcome,
    picture_of,
    run_name,
    scratch,
    settings_text,
)

_MOST_METRICS = 500  # in one request; MLflow takes 1000
_MOST_PARAMETERS = 100  # in one request, at most as MLflow has it
_MOST_SECONDS = 5.0  # between two requests
_LONGEST_PARAMETER = 500  # characters; the whole text is in config.toml


class MLflow(Tracker):
    """Writes a run of MLflow for every arm and seed: parameters, metrics by round, and files.

    ``uri`` is where to: ``http://…`` of a server, or a database file ``sqlite:///runs/mlflow.db``. Without one it is
    what the environment's ``MLFLOW_TRACKING_URI`` says, else the file ``mlflow.db`` in the experiment's output folder.
    ``experiment`` is the experiment's name unless given. The files are ``config.toml``, ``decisions.csv`` with every
    decision and its reason, ``run.png`` and ``model.safetensors``. A run that goes on after an interruption continues
    in MLflow, too. Needs the extra ``fedalign[mlflow]``. See them with ``mlflow ui --backend-store-uri URI``.
    """

    package, extra, title = "mlflow", "mlflow", "MLflow"

    def __init__(self, uri: str = "", experiment: str = "") -> None:
        super().__init__()
        self._uri, self._experiment = uri, experiment
        self._client: Any = None
        self._id = ""
        self._pending: list[Any] = []
        self._sent = 0.0
        self._status = "KILLED"  # unless the run ends

    def check(self, run: RunInfo) -> None:
        """Refuse a run without a place to write to."""
        if not self._uri and "MLFLOW_TRACKING_URI" not in os.environ and run.home is None:
            raise FedalignError("the tracker mlflow needs a place: mlflow(uri='sqlite:///runs/mlflow.db')")

    def open(self) -> int:
        """Open the run, or go on with that of an earlier session; return how many rounds it has."""
        run, uri = self.run, self._uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        self.check(run)
        if not uri:
            assert run.home is not None
            run.home.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{run.home.resolve() / 'mlflow.db'}"
        with _quiet():
            self._client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
            self._sent, self._status, self._pending = time.monotonic(), "KILLED", []
            known = self._continued(uri)
            if known is not None:
                return known
            self._id = self._client.create_run(self._experiment_id(uri), run_name=run_name(run)).info.run_id
            self._remember(uri)
            make = importlib.import_module("mlflow.entities").Param
            facts = _flat({"arm": run.arm, "seed": run.seed, **run.settings})
            parameters = [make(key, value) for key, value in facts.items()]
            for first in range(0, len(parameters), _MOST_PARAMETERS):
                self._client.log_batch(self._id, params=parameters[first : first + _MOST_PARAMETERS])
            self._client.log_text(self._id, settings_text(run), "config.toml")
        return 0

    def write(self, record: RoundRecord) -> None:
        """Keep a round's numbers, and send them when there are enough or some time has passed."""
        make, now = importlib.import_module("mlflow.entities").Metric, int(1000 * time.time())
        self._pending += [
            make(_key(name), value, now, record.round)
            for name, value in curves_of(record).items()
            if math.isfinite(value)
        ]
        if len(self._pending) >= _MOST_METRICS or time.monotonic() - self._sent > _MOST_SECONDS:
            self._send()

    def on_stop(self, stopped: Stopped) -> None:
        """Note why the run stopped."""
        with _quiet():
            self._client.set_tag(self._id, "stopped", str(stopped))

    def on_error(self, error: DivergedError) -> None:
        """Note how the run diverged."""
        with _quiet():
            self._client.set_tag(self._id, "diverged", str(error))

    def on_end(self, result: Any) -> None:
        """Write the decisions, a picture and the model."""
        self._send()
        with _quiet(), scratch() as folder:
            self._client.set_tag(self._id, "outcome", outcome(result))
            if self.records:
                self._client.log_text(self._id, decision_table(self.records), "decisions.csv")
                self._client.log_figure(self._id, picture_of(self.records, run_name(self.run)), "run.png")
            if result.model is not None:
                self._client.log_artifact(self._id, str(model_file(self.run, result, Path(folder))))
        self._status = "FINISHED" if result.error is None else "FAILED"

    def close(self) -> None:
        """Send what is pending and end the run."""
        if self._client is None or not self._id:
            return
        self._send()
        with _quiet():
            self._client.set_terminated(self._id, self._status)
        self._client = None

    def _send(self) -> None:
        self._sent = time.monotonic()
        while self._pending:
            batch, self._pending = self._pending[:_MOST_METRICS], self._pending[_MOST_METRICS:]
            with _quiet():
                self._client.log_batch(self._id, metrics=batch)

    def _experiment_id(self, uri: str) -> str:
        name = self._experiment or self.run.experiment or "fedalign"
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        files = None
        if uri.startswith("sqlite:///"):  # beside the database, not in the folder that the command was started in
            files = Path(uri.removeprefix("sqlite:///")).resolve().with_name("mlflow-files").as_uri()
        return str(self._client.create_experiment(name, artifact_location=files))

    @property
    def _note(self) -> Path | None:
        return None if self.run.folder is None else self.run.folder / "mlflow.json"

    def _remember(self, uri: str) -> None:
        if self._note is not None:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._note, json.dumps({"uri": uri, "run": self._id}) + "\n")

    def _continued(self, uri: str) -> int | None:
        """Open the run that an earlier session wrote, and return how many of its rounds are there; None: none."""
        if not self.run.start or self._note is None or not self._note.exists():
            return None
        before = json.loads(self._note.read_text(encoding="utf-8"))
        if before["uri"] != uri:
            return None
        self._id = before["run"]
        steps = [one.step for one in self._client.get_metric_history(self._id, "clients/trained")]
        self._client.update_run(self._id, status="RUNNING")
        return max(steps, default=-1) + 1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep MLflow's telemetry off, and its messages about its own database and dependencies to itself."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault(
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3"
    )  # a server that is away must not stop a run for minutes
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("mlflow")  # which sets the levels of its loggers
    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Give settings as MLflow's parameters: one text each, with a dot between a section and its key."""
    found: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[_key(f"{prefix}{key}")] = str(value)[:_LONGEST_PARAMETER]
    return found


def _key(name: str) -> str:
    """Replace what MLflow does not take in a name.

    >>> _key("metric/recall[0]"), _key("round/test_loss")
    ('metric/recall_0_', 'round/test_loss')
    """
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)
