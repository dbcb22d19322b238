"""The callback that writes a run's curves for TensorBoard."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from fedalign.callbacks import Callback, RunInfo
from fedalign.errors import FedalignError
from fedalign.protocol.records import Decision, RoundRecord

_CURVES = ("epsilon", "global_loss", "global_accuracy", "test_accuracy", "test_loss", "train_loss", "inclusion")
_COUNTS: tuple[Decision, ...] = ("trained", "admitted", "base", "declined", "refused", "lost", "absent")


class TensorBoard(Callback):
    """Writes every round's figures and the number of clients by decision, in TensorBoard's format.

    ``folder`` holds a folder for each arm and seed; without one, the files lie in the run's own folder. Needs the
    extra ``fedalign[tensorboard]``. See them with ``tensorboard --logdir DIR``.
    """

    needs_model = False

    def __init__(self, folder: str = "") -> None:
        self._folder = folder
        self._writer: Any = None

    def on_start(self, run: RunInfo) -> None:
        """Open the run's event file; a resumed run hides what an earlier session wrote beyond its start."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise FedalignError("TensorBoard is not installed: pip install 'fedalign[tensorboard]'") from error
        if not self._folder and run.folder is None:
            raise FedalignError("the tracker tensorboard needs a folder: tensorboard(folder='runs/curves')")
        if self._folder:
            place = Path(self._folder).expanduser() / (run.arm or "run") / f"seed-{run.seed}"
        else:
            assert run.folder is not None
            place = run.folder / "tensorboard"
        self._writer = SummaryWriter(str(place), purge_step=run.start or None)

    def on_round(self, record: RoundRecord, model: Any) -> None:
        """Write one point of every curve."""
        for name in _CURVES:
            value = getattr(record, name)
            if value is not None:
                self._writer.add_scalar(f"round/{name}", value, record.round)
        for name in ("models_down", "models_up", "samples"):
            self._writer.add_scalar(f"cost/{name}", getattr(record, name), record.round)
        decisions = Counter(client.decision for client in record.clients)
        for decision in _COUNTS:
            self._writer.add_scalar(f"clients/{decision}", decisions[decision], record.round)

    def close(self) -> None:
        """Write what is pending and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
