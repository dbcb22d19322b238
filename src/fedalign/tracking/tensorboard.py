"""The tracker that writes files for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fedalign.callbacks import RunInfo
from fedalign.errors import FedalignError
from fedalign.protocol.records import RoundRecord
from fedalign.tracking.tracker import Tracker, curves_of, outcome, picture_of, run_name, settings_text

_MOST_TEXTS = 100  # of decisions, in a run


class TensorBoard(Tracker):
    """Writes curves of every number, decisions with their reasons, the settings, a picture and the model's weights.

    ``folder`` holds a folder for each arm and seed; without one, the files lie in the run's own folder. TensorBoard
    keeps no models: it gets the distribution of every weight tensor at the end. Decisions are written for at most a
    hundred rounds. Needs the extra ``fedalign[tensorboard]``. See them with ``tensorboard --logdir DIR``.
    """

    package, extra, title = "tensorboard", "tensorboard", "TensorBoard"

    def __init__(self, folder: str = "") -> None:
        super().__init__()
        self._folder = folder
        self._writer: Any = None

    def check(self, run: RunInfo) -> None:
        """Refuse a run without a place to write to."""
        if not self._folder and run.folder is None:
            raise FedalignError("the tracker tensorboard needs a folder: tensorboard(folder='runs/curves')")

    def open(self) -> int:
        """Open the run's event file; a resumed run hides what an earlier session wrote beyond its start."""
        from torch.utils.tensorboard import SummaryWriter

        run = self.run
        self.check(run)
        if self._folder:
            place = Path(self._folder).expanduser() / (run.arm or "run") / f"seed-{run.seed}"
        else:
            assert run.folder is not None
            place = run.folder / "tensorboard"
        has_rounds = any(place.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(place), purge_step=run.start if run.start and has_rounds else None)
        self._writer.add_text("settings", _code(settings_text(run)), run.start)
        return run.start if has_rounds else 0

    def write(self, record: RoundRecord) -> None:
        """Write one point of every curve, and the decisions."""
        for name, value in curves_of(record).items():
            self._writer.add_scalar(name, value, record.round)
        if record.round % -(-self.run.rounds // _MOST_TEXTS) == 0:
            self._writer.add_text("decisions", _table(record), record.round)

    def on_end(self, result: Any) -> None:
        """Write how the run ended, a picture of it, and the weights of its model."""
        last = max(0, len(self.records) - 1)
        self._writer.add_text("outcome", outcome(result), last)
        if self.records:
            self._writer.add_text("decisions", _table(self.records[-1]), last)
            self._writer.add_figure("run", picture_of(self.records, run_name(self.run)), last)
        if isinstance(result.model, nn.Module):
            for name, tensor in result.model.state_dict().items():
                self._writer.add_histogram(f"model/{name}", tensor.detach().cpu().double().numpy(), last)

    def close(self) -> None:
        """Write what is pending and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _table(record: RoundRecord) -> str:
    """Write a round's decisions as a table in Markdown."""
    lines = ["| client | decision | weight | loss | reason |", "|---|---|---|---|---|"]
    for client in record.clients:
        loss = "" if client.loss is None else f"{client.loss:.4g}"
        name = f"{client.name} (priority)" if client.priority else client.name
        reason = client.reason.replace("|", "\\|")
        lines.append(f"| {name} | {client.decision} | {client.weight:.4g} | {loss} | {reason} |")
    return "\n".join(lines)


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
