"""Callbacks: code that is notified of every round of a run. The store, progress, theory and trackers are callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
    """The run that a callback is told about. ``start`` is its first round, ``last`` the record of the round before."""

    arm: str
    seed: int
    rounds: int
    start: int = 0
    last: RoundRecord | None = None
    folder: Path | None = None  #: where the run's own files are, if it has a folder


class Callback:
    """Is notified of a run's rounds. Subclass it and override what you need; every method does nothing by default.

    One object serves one run.

    >>> class Accuracies(Callback):
    ...     needs_model = False
    ...     def __init__(self):
    ...         self.seen = []
    ...     def on_round(self, record, model):
    ...         self.seen.append(record.test_accuracy)
    """

    needs_model: bool = True  #: False: :meth:`on_round` is given None, which avoids building a module
    changes_records: bool = False  #: True: :meth:`on_round` returns records with values added

    def on_start(self, run: RunInfo) -> None:
        """Called once, before the first round."""

    def on_round(self, record: RoundRecord, model: Any) -> RoundRecord | None:
        """Called after every round. ``model`` is the served model, an ``nn.Module`` in eval mode with its buffers.

        In local-only training it is a list with a module for each client. Return a record to replace this one.
        """
        return None

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
        if callback.needs_model and module is None:
            module = modules(done.model)
        changed = callback.on_round(done.record, module if callback.needs_model else None)
        if changed is not None:
            if not isinstance(changed, RoundRecord):
                raise FedalignError(f"{type(callback).__name__}.on_round must return a RoundRecord or None")
            done = replace(done, record=changed)
    for callback in callbacks:
        callback.on_snapshot(done.record, done.snapshot)
    return done


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
