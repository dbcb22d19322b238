"""The tracker that writes runs of Weights & Biases."""

from __future__ import annotations

import importlib
import json
import math
import os
from pathlib import Path
from typing import Any, Literal

from fedalign.callbacks import Stopped
from fedalign.errors import DivergedError
from fedalign.experiments.store import write_atomically
from fedalign.protocol.records import RoundRecord
from fedalign.tracking.tracker import (
    Tracker,
    curves_of,
    decision_rows,
    model_file,
    outcome,
    picture_of,
    run_name,
    scratch,
)


class WandB(Tracker):
    """Writes a run of Weights & Biases for every arm and seed: settings, curves, decisions, a picture and the model.

    ``mode`` is ``"offline"`` unless you or the environment's ``WANDB_MODE`` say otherwise: files are written into the
    experiment's output folder, and nothing leaves the machine before ``wandb sync DIR/wandb/offline-run-*``. With
    ``"online"`` W&B uploads as it goes, to the account that you are logged in to. ``project`` is the experiment's name
    unless given. Needs the extra ``fedalign[wandb]``.
    """

    package, extra, title = "wandb", "wandb", "Weights & Biases"

    def __init__(self, project: str = "", mode: Literal["", "offline", "online"] = "", entity: str = "") -> None:
        super().__init__()
        self._project, self._mode, self._entity = project, mode, entity
        self._wandb: Any = None
        self._failed = 0

    def open(self) -> int:
        """Open the run; one that goes on after an interruption has the same id, so that W&B joins its parts."""
        wandb: Any = importlib.import_module("wandb")
        run = self.run
        home = run.home or Path()
        home.mkdir(parents=True, exist_ok=True)
        before = self._id()
        self._wandb = wandb.init(
            dir=str(home),
            project=self._project or run.experiment or "fedalign",
            entity=self._entity or None,
            id=before,
            resume="allow" if before else None,
            name=run_name(run),
            group=run.arm or None,
            config={"arm": run.arm, "seed": run.seed, **run.settings},
            mode=self._mode or os.environ.get("WANDB_MODE") or "offline",
            reinit="create_new",  # runs of an experiment go on side by side
            settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
        )
        self._failed = 1  # until the run has ended
        if run.folder is not None:
            run.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(run.folder / "wandb.json", json.dumps({"run": self._wandb.id}) + "\n")
        return run.start if before else 0

    def write(self, record: RoundRecord) -> None:
        """Write one point of every curve."""
        values = {name: value for name, value in curves_of(record).items() if math.isfinite(value)}
        self._wandb.log(values, step=record.round)

    def on_stop(self, stopped: Stopped) -> None:
        """Note why the run stopped."""
        self._wandb.summary["stopped"] = str(stopped)

    def on_error(self, error: DivergedError) -> None:
        """Note how the run diverged."""
        self._wandb.summary["diverged"] = str(error)

    def on_end(self, result: Any) -> None:
        """Write the decisions, a picture and the model."""
        wandb: Any = importlib.import_module("wandb")
        self._wandb.summary["outcome"] = outcome(result)
        if self.records:
            heading, *rows = decision_rows(self.records)
            last = self.records[-1].round
            with scratch() as folder:
                path = Path(folder) / "run.png"  # W&B's reader of figures needs pyplot, which the package does not load
                picture_of(self.records, run_name(self.run)).savefig(path)
                tables = {"decisions": wandb.Table(columns=heading, data=rows), "run": wandb.Image(str(path))}
                self._wandb.log(tables, step=last)
        if result.model is not None:
            with scratch() as folder:
                path = model_file(self.run, result, Path(folder))
                target = Path(self._wandb.dir) / path.name
                target.write_bytes(path.read_bytes())
            self._wandb.save(str(target), base_path=self._wandb.dir, policy="end")
        self._failed = 0 if result.error is None else 1

    def close(self) -> None:
        """End the run; without an end it counts as failed."""
        if self._wandb is not None:
            self._wandb.finish(exit_code=self._failed)
            self._wandb = None

    def _id(self) -> str | None:
        """Return the id that an earlier session of this run had."""
        if not self.run.start or self.run.folder is None or not (self.run.folder / "wandb.json").exists():
            return None
        return str(json.loads((self.run.folder / "wandb.json").read_text(encoding="utf-8"))["run"])
