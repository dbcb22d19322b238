"""Callbacks: code that is notified of every round of a run, and may stop it.

The store, progress, theory, early stopping and trackers are callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedalign.errors import FedalignError
from fedalign.protocol.messages import RoundDone, Snapshot
from fedalign.protocol.records import RoundRecord

if TYPE_CHECKING:
    from torch import nn

    from fedalign.errors import DivergedError


@dataclass(frozen=True)
class RunInfo:
    """The run that a callback is told about. ``start`` is its first round, ``last`` the record of the round before.

    ``past`` holds the records of all rounds before, so that a callback that counts goes on as if nothing had
    interrupted the run. ``metrics`` are the names of the run's metrics. An experiment has a name, an output folder and
    ``settings``; its runs have folders of their own in it.
    """

    arm: str
    seed: int
    rounds: int
    start: int = 0
    last: RoundRecord | None = None
    folder: Path | None = None  #: where the run's own files are, if it has a folder
    past: tuple[RoundRecord, ...] = ()
    metrics: tuple[str, ...] = ()
    experiment: str = ""
    home: Path | None = None  #: the output folder of the experiment, or of the run if it is the only one
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stopped:
    """Why a run ended before its last round, and the number of the last round that it did.

    >>> print(Stopped(41, "test_accuracy has not improved in 10 rounds"))
    stopped after round 41: test_accuracy has not improved in 10 rounds
    """

    round: int
    reason: str

    def __str__(self) -> str:
        return f"stopped after round {self.round}: {self.reason}"


class Callback:
    """Is notified of a run's rounds. Subclass it and override what you need; every method does nothing by default.

    One object serves one run.

    >>> class Accuracies(Callback):
    ...     needs_model = False
    ...     def __init__(self):
    ...         self.seen = []
    ...     def on_round(self, record, model):
    ...         self.seen.append(record.test_accuracy)
    ...     def should_stop(self):
    ...         return "good enough" if self.seen[-1] > 0.99 else None
    """

    needs_model: bool = True  #: False: :meth:`on_round` is given None, which avoids building a module
    changes_records: bool = False  #: True: :meth:`on_round` returns records with values added

    def check(self, run: RunInfo) -> None:
        """Called before anything is written: raise a :class:`FedalignError` for a run that cannot be served."""

    def on_start(self, run: RunInfo) -> None:
        """Called once, before the first round."""

    def on_round(self, record: RoundRecord, model: Any) -> RoundRecord | None:
        """Called after every round. ``model`` is the served model, an ``nn.Module`` in eval mode with its buffers.

        In local-only training it is a list with a module for each client. Return a record to replace this one.
        """
        return None

    def wants_model(self, record: RoundRecord) -> bool:
        """Say whether :meth:`on_round` is given the model of this round, by default :attr:`needs_model`.

        A callback that looks at few models saves the time to build the others.
        """
        return self.needs_model

    def should_stop(self) -> str | None:
        """Return a reason to end the run with the round that it has just done, or None. Asked after every round."""
        return None

    def on_stop(self, stopped: Stopped) -> None:
        """Called if some callback stopped the run: there are no further rounds, and :meth:`on_end` follows."""

    def on_snapshot(self, record: RoundRecord, snapshot: Snapshot) -> None:
        """Called after :meth:`on_round` with everything that a resume needs."""

    def on_error(self, error: DivergedError) -> None:
        """Called if training diverged: there are no further rounds."""

    def on_end(self, result: Any) -> None:
        """Called after the last round with the run's :class:`~fedalign.SimulationResult`."""

    def close(self) -> None:
        """Called last, also when the run was interrupted: write what is pending."""


Modules = Callable[[Any], Any]  # from the flat model of a RoundDone to an nn.Module, or to one for each client


def notify_round(callbacks: Sequence[Callback], done: RoundDone, modules: Modules) -> RoundDone:
    """Tell callbacks of a round; return it with the record as the callbacks changed it."""
    module: nn.Module | list[nn.Module] | None = None
    for callback in callbacks:
        wanted = callback.wants_model(done.record)
        if wanted and module is None:
            module = modules(done.model)
        changed = callback.on_round(done.record, module if wanted else None)
        if changed is not None:
            if not isinstance(changed, RoundRecord):
                raise FedalignError(f"{type(callback).__name__}.on_round must return a RoundRecord or None")
            done = replace(done, record=changed)
    for callback in callbacks:
        callback.on_snapshot(done.record, done.snapshot)
    return done


def notify_stop(callbacks: Sequence[Callback], round: int) -> Stopped | None:
    """Ask callbacks whether the run ends after this round; if so tell all, and return the first one's reason."""
    reasons = [reason for callback in callbacks if (reason := callback.should_stop()) is not None]
    if not reasons:
        return None
    stopped = Stopped(round, reasons[0])
    notify_stopped(callbacks, stopped)
    return stopped


def notify_stopped(callbacks: Sequence[Callback], stopped: Stopped) -> None:
    """Tell callbacks that the run has stopped."""
    for callback in callbacks:
        callback.on_stop(stopped)


def may_stop(callback: Callback) -> bool:
    """Say whether a callback can stop a run at all."""
    return type(callback).should_stop is not Callback.should_stop


def notify_error(callbacks: Sequence[Callback], error: DivergedError) -> None:
    """Tell callbacks that training diverged."""
    for callback in callbacks:
        callback.on_error(error)


def notify_end(ends: Iterable[tuple[Sequence[Callback], Any]]) -> None:
    """Tell callbacks of the end of their runs, also if an earlier one fails; the first failure is raised at the end."""
    failed: Exception | None = None
    for callbacks, result in ends:
        for callback in callbacks:
            try:
                callback.on_end(result)
            except Exception as error:
                failed = failed or error
    if failed is not None:
        raise failed


def close_all(callbacks: Sequence[Callback]) -> None:
    """Close every callback, also if closing an earlier one fails; the first failure is raised at the end."""
    failed: BaseException | None = None
    for callback in callbacks:
        try:
            callback.close()
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed
