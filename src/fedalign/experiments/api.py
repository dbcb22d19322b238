"""``Experiment`` and ``run``: in Python what ``fedalign run`` is on the command line."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w
from rich.console import Console

from fedalign.callbacks import Callback
from fedalign.cli.progress import ExperimentProgress
from fedalign.data.federation import Federation
from fedalign.errors import FedalignError
from fedalign.experiments import config
from fedalign.experiments.additions import with_additions
from fedalign.experiments.experiment import Experiment as CheckedExperiment
from fedalign.experiments.from_python import Tables
from fedalign.experiments.output_folder import locked_folder
from fedalign.experiments.result import ExperimentResult
from fedalign.experiments.runner import CallbackFactory, execute, prepare
from fedalign.settings.live_objects import live_sections


class Experiment(CheckedExperiment):
    """Several arms compared over several seeds: rules on the same data, with the same model and local work.

    ``data`` is a :class:`Federation`, a function of the seed that makes one, or a name as in settings files. ``model``
    is a module, a function or a class that makes one, or a name. ``arms`` is a list of built-in arms, or maps names to
    rules: objects, names, or tables with ``rule`` and settings such as ``lr`` and ``warmup``. ``local`` is SGD with
    ``lr=0.1`` and ``epochs=5`` unless given. All other settings are those at the top of a settings file: ``rounds``,
    ``seeds``, ``epsilon``, ``warmup``, ``trust``, ``aggregator``, ``participation``, ``server`` and so on. ``metrics``
    maps names to functions of outputs and targets, objects of torchmetrics or built-in names. ``callbacks`` and
    ``track`` hold names, classes or objects, of which every run gets a copy. Raises :class:`FedalignError` for a
    setting that is wrong.

    >>> import fedalign as fa, torch
    >>> x, y = torch.randn(60, 4), torch.arange(60) % 3
    >>> fed = fa.Federation.from_arrays([(x[:30], y[:30]), (x[30:], y[30:])], priority=[True, False], test_fraction=0.2)
    >>> experiment = Experiment(
    ...     fed, lambda: torch.nn.Linear(4, 3), {"priority": None, "wide": fa.Align(epsilon=1.0)}, rounds=5, seeds=2
    ... )
    >>> experiment.arms, experiment.seeds
    (['priority', 'wide'], [0, 1])
    """

    def __init__(
        self,
        data: Any,
        model: Any,
        arms: Sequence[str] | Mapping[str, Any] | None = None,
        *,
        name: str = "experiment",
        local: Any = None,
        folder: str | Path | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(data, Federation) and not data.has_heldout:
            settings.setdefault("match_on", "train")  # there is nothing else to match on
        home = Path(folder or ".").resolve()
        tables = Tables(home)
        given = {"name": name, "data": data, "model": model, "arms": arms, "local": local, **settings}
        table = tables.all(given)
        table.setdefault("local", {"kind": "sgd", "lr": 0.1, "epochs": 5})
        self._held = tables.held  # settings can refer to these objects while this experiment exists
        super().__init__(config.resolve(table, home), home)

    @classmethod
    def from_toml(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Experiment:
        """Read an experiment from a settings file, with overrides such as ``{"local.lr": 0.05}``."""
        if not Path(path).is_file():
            raise FedalignError(f"there is no file {path}")
        return cls._checked(*config.load_settings(str(path), overrides))

    def to_toml(self, path: str | Path) -> Path:
        """Write the experiment as a settings file, which :meth:`from_toml` reads as an equal one.

        Raises :class:`FedalignError` if it has objects that no file can describe, such as a lambda.
        """
        live = live_sections(self.settings)
        if live:
            raise FedalignError(
                f"{live[0]} is an object that was given in Python, so no file can describe it: "
                "give a built-in name, or a class or function from a module that can be imported"
            )
        try:
            Path(path).write_text(tomli_w.dumps(self.settings), encoding="utf-8")
        except OSError as error:
            raise FedalignError(f"cannot write {path}: {error.strerror}") from error
        return Path(path)

    def run(self, out: str | Path | None = None, **options: Any) -> ExperimentResult:
        """Run the experiment; see :func:`run`."""
        return run(self, out, **options)

    def __eq__(self, other: object) -> bool:
        """Tell whether another experiment has the same settings; the name of an experiment is one of them."""
        return isinstance(other, CheckedExperiment) and self.settings == other.settings

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Experiment({self.name!r}, arms={self.arms}, seeds={self.seeds}, rounds={self.rounds})"

    @classmethod
    def _checked(cls, settings: dict[str, Any], folder: Path) -> Experiment:
        made = cls.__new__(cls)
        made._held = []
        CheckedExperiment.__init__(made, settings, folder)
        return made


def experiment(name: str | Path, overrides: Mapping[str, Any] | None = None, **more: Any) -> Experiment:
    """Return an experiment of the package, or that of a settings file or of a folder with data.

    ``overrides`` are settings such as ``{"local.lr": 0.05}``; those without a dot may be given as keywords.

    >>> experiment("synth-low", {"local.lr": 0.05}, rounds=20).rounds
    20
    """
    return Experiment._checked(*config.load_settings(str(name), {**(overrides or {}), **more}))


def run(
    experiment: CheckedExperiment | str | Path,
    out: str | Path | None = None,
    *,
    resume: bool | Literal["auto"] = False,
    device: str | None = None,
    on: Literal["here", "ray"] = "here",
    workers: int | None = None,
    callbacks: Sequence[CallbackFactory | Callback | str | Mapping[str, Any]] = (),
    continue_stopped: bool = False,
    report: bool = True,
    progress: bool | None = None,
    **overrides: Any,
) -> ExperimentResult:
    """Run an experiment into a folder, as ``fedalign run`` does, and return its results.

    ``experiment`` is an :class:`Experiment`, or a name or a file, with ``overrides`` as keywords. ``out`` is
    ``runs/NAME`` unless given, or ``runs/NAME-2`` and so on. ``resume=True`` continues the run in the folder; with
    ``"auto"`` one that is not there is begun. A resume may add arms and seeds; those that stopped early stay so, unless
    ``continue_stopped`` asks for more rounds. ``callbacks`` are objects, of which every run gets a copy, functions of
    an arm and a seed that make a :class:`Callback` for that run, or names, which replace those of a file.
    ``report=False`` leaves the page and its pictures out. ``progress`` shows a bar and the figures of every arm; it is
    on in a terminal. The folder is locked meanwhile: a :class:`FedalignError` names the process that writes it.

    >>> import tempfile
    >>> result = run("synth-low", tempfile.mkdtemp(), rounds=2, seeds=1, arms=["priority", "fedalign"], report=False)
    >>> result.arms, len(result["fedalign", 0].history)
    (['priority', 'fedalign'], 2)
    """
    if named := [one for one in callbacks if isinstance(one, str | Mapping)]:
        overrides["callbacks"] = named
    if isinstance(experiment, CheckedExperiment):
        if overrides:
            raise FedalignError(f"{next(iter(overrides))} is a setting of the experiment, so it cannot be given to run")
        checked = experiment
    else:
        checked = Experiment._checked(*config.load_settings(str(experiment), overrides))
    with locked_folder(None if out is None else Path(out), checked.name, bool(resume)) as lock:
        folder = lock.folder
        if resume == "auto":
            resume = (folder / "config.toml").is_file()
        if continue_stopped and not resume:
            raise FedalignError("continue_stopped goes with resume=True: it continues runs that are there")
        if resume and not isinstance(experiment, CheckedExperiment):
            found = config.load_settings(str(experiment), with_additions(folder, overrides))
            checked = Experiment._checked(*found)
        made = [one for one in callbacks if not isinstance(one, str | Mapping)]
        bar = None
        if sys.stdout.isatty() if progress is None else progress:
            bar = ExperimentProgress(Console(), checked.arms, checked.rounds)
        prepared = prepare(
            checked,
            folder,
            resume=resume,
            device=checked.device if device is None else device,
            on=on,
            workers=workers,
            callbacks=[*map(_factory, made), *([] if bar is None else [bar.callback])],
            continue_stopped=continue_stopped,
        )
        if bar is not None:
            bar.start_at(prepared.start)
        with bar or contextlib.nullcontext():
            outcome = execute(prepared)
        result = ExperimentResult(
            folder, outcome.summary, outcome.histories, outcome.diverged, checked, prepared.notes, outcome.stopped
        )
        if report:
            result.report()
    return result


def _factory(given: CallbackFactory | Callback) -> CallbackFactory:
    """Return a function of an arm and a seed; an object is copied, because each run has its own."""
    return (lambda arm, seed: copy.deepcopy(given)) if isinstance(given, Callback) else given
