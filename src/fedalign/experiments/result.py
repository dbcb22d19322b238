"""The results of an experiment: what its folder holds, ready to use in Python."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from fedalign.errors import FedalignError, nearest
from fedalign.experiments.experiment import Experiment
from fedalign.experiments.store import RunStore
from fedalign.protocol.records import History

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ArmRun:
    """The run of one arm and one seed: its history, its folder, and why it ended early if it did.

    ``diverged`` and ``stopped`` are messages, or None.
    """

    arm: str
    seed: int
    history: History
    diverged: str | None
    folder: Path
    experiment: Experiment | None = field(default=None, repr=False)
    stopped: str | None = None

    def model(self) -> Any:
        """Return the final model, in eval mode; for arms without a shared model, one for each client by name.

        Raises :class:`FedalignError` if the run diverged, or if the experiment's settings are not known.
        """
        path = RunStore(self.folder).model
        if not path.is_file():
            raise FedalignError(f"{self.folder} has no final model" + (f": {self.diverged}" if self.diverged else ""))
        return self._read(path)

    def best_model(self) -> Any:
        """Return the model of the best round, as :meth:`model` does the final one.

        Raises :class:`FedalignError` if no :class:`BestRound` among the experiment's callbacks has kept it.
        """
        path = RunStore(self.folder).best
        if not path.is_file():
            raise FedalignError(f"{self.folder} has no model of a best round; add callbacks=['best-round'] to keep it")
        return self._read(path)

    def personal_models(self, method: str) -> Any:
        """Return the clients' personal models by their names, as :meth:`model` does the final one.

        Raises :class:`FedalignError` if the run has not saved them (``[personal] save = true``).
        """
        path = RunStore(self.folder).personal(method)
        if not path.is_file():
            raise FedalignError(
                f"{self.folder} has no models of the personal method {method!r}; save = true keeps them"
            )
        return self._read(path)

    def _read(self, path: Path) -> Any:
        if self.experiment is None:
            raise FedalignError(f"{path} holds the weights; the experiment that made its module is needed, too")
        tensors = load_file(path)
        module = self.experiment.model()
        if set(module.state_dict()) == set(tensors):
            return _loaded(module, tensors)
        keys = list(module.state_dict())
        names = [text.removesuffix(f".{keys[0]}") for text in tensors if text.endswith(f".{keys[0]}")]
        make = self.experiment.model
        return {name: _loaded(make(), {key: tensors[f"{name}.{key}"] for key in keys}) for name in names}


@dataclass(frozen=True)
class ExperimentResult:
    """The results of :func:`fedalign.run`.

    ``folder`` is where they lie. ``summary`` is the content of ``summary.json``, ``histories`` has the rounds by arm
    and seed, ``diverged`` the messages of runs that diverged. ``result["fedalign", 0]`` is the run of an arm and a
    seed. ``stopped`` says why and when runs stopped early, by arm and seed. ``print(result)`` shows the table.
    """

    folder: Path
    summary: dict[str, Any] = field(repr=False)
    histories: dict[str, dict[int, History]] = field(repr=False)
    diverged: dict[str, dict[int, str]] = field(repr=False)
    experiment: Experiment | None = field(default=None, repr=False)
    notes: Sequence[str] = field(default=(), repr=False)
    stopped: dict[str, dict[int, str]] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, folder: str | Path) -> ExperimentResult:
        """Read the folder of a run; ``notes`` say what an unfinished one lacks.

        Raises :class:`FedalignError` if the folder holds no run, or none that has finished a round.
        """
        from fedalign.experiments.config import load
        from fedalign.report.read_runs import read_run
        from fedalign.settings.live_objects import live_sections

        run = read_run(Path(folder))
        diverged, stopped = (
            {
                arm: {int(seed): text for seed, text in figures[key].items()}
                for arm, figures in run.summary["arms"].items()
                if figures.get(key)
            }
            for key in ("diverged", "stopped")
        )
        known = not live_sections(run.settings)
        experiment = load(str(run.folder / "config.toml"), folder=Path()) if known else None
        notes = [f"unfinished: {what}" for what in run.missing]
        return cls(run.folder, run.summary, run.histories, diverged, experiment, notes, stopped)

    @property
    def arms(self) -> list[str]:
        """The names of the arms."""
        return list(self.histories)

    @property
    def seeds(self) -> list[int]:
        """The seeds of every arm."""
        return list(next(iter(self.histories.values())))

    def __getitem__(self, key: tuple[str, int]) -> ArmRun:
        arm, seed = key
        if arm not in self.histories:
            raise FedalignError(f"unknown arm {arm!r}; {nearest(str(arm), self.histories)}")
        if seed not in self.histories[arm]:
            raise FedalignError(f"there is no seed {seed!r}; known: {', '.join(map(str, self.histories[arm]))}")
        failed = self.diverged.get(arm, {}).get(seed)
        home = self.folder / arm / f"seed-{seed}"
        early = self.stopped.get(arm, {}).get(seed)
        return ArmRun(arm, seed, self.histories[arm][seed], failed, home, self.experiment, early)

    def table(self) -> str:
        """Return the table of all arms as text, and what else the command line shows below it."""
        from fedalign.report.terminal import tables

        text = io.StringIO()
        Console(file=text, width=100, force_terminal=False, force_jupyter=False).print(*tables(self.summary), sep="\n")
        return text.getvalue()

    def __str__(self) -> str:
        return self.table()

    def report(self) -> Path:
        """Write the report into the folder, and return the path of its page."""
        from fedalign.report.page import write_report
        from fedalign.report.read_runs import read_run

        return write_report([read_run(self.folder)], self.folder).page

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with one row for each arm, seed, round and client; it needs pandas."""
        frames = [
            history.to_frame().assign(arm=arm, seed=seed)
            for arm, runs in self.histories.items()
            for seed, history in runs.items()
        ]
        import pandas as pd

        joined = pd.concat(frames, ignore_index=True)
        return joined[["arm", "seed", *(column for column in joined.columns if column not in ("arm", "seed"))]]


def _loaded(module: nn.Module, tensors: dict[str, Any]) -> nn.Module:
    module.load_state_dict(tensors)
    return module.eval()
