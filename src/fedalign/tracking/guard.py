"""Keeps a run going when its tracker fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedalign.callbacks import Callback, RunInfo, Stopped
from fedalign.errors import FedalignError, FederationWarning
from fedalign.protocol.messages import Snapshot
from fedalign.protocol.records import RoundRecord
from fedalign.settings.user_modules import in_words

if TYPE_CHECKING:
    from fedalign.errors import DivergedError

Report = Callable[[str], None]


def warn(message: str) -> None:
    """Report by a warning."""
    warnings.warn(message, FederationWarning, stacklevel=2)


class Guarded(Callback):
    """Passes everything on to a tracker, and leaves it out from its first failure on: a run is worth more than a curve.

    The failure is reported once, in one sentence. A tracker only watches: it cannot stop the run. One that cannot start
    is an error, before any round: a :class:`FedalignError` with the tracker's ``name``.
    """

    def __init__(self, tracker: Callback, name: str = "", report: Report = warn) -> None:
        self.tracker, self._name, self._report = tracker, name or type(tracker).__name__, report
        self.needs_model, self.changes_records = tracker.needs_model, tracker.changes_records
        self._failed = False

    def check(self, run: RunInfo) -> None:
        """Let the tracker refuse the run."""
        self.tracker.check(run)

    def on_start(self, run: RunInfo) -> None:
        """Start the tracker; raises :class:`FedalignError` if it cannot."""
        try:
            self.tracker.on_start(run)
        except FedalignError:
            raise
        except Exception as error:
            raise FedalignError(f"the tracker {self._name} cannot start: {in_words(error)}") from error

    def wants_model(self, record: RoundRecord) -> bool:
        """Ask the tracker, unless it has failed."""
        return bool(self._try(f"round {record.round}", self.tracker.wants_model, record))

    def on_round(self, record: RoundRecord, model: Any) -> RoundRecord | None:
        """Pass the round on."""
        changed: RoundRecord | None = self._try(f"round {record.round}", self.tracker.on_round, record, model)
        return changed

    def on_snapshot(self, record: RoundRecord, snapshot: Snapshot) -> None:
        """Pass the snapshot on."""
        self._try(f"round {record.round}", self.tracker.on_snapshot, record, snapshot)

    def on_stop(self, stopped: Stopped) -> None:
        """Pass on that the run stopped."""
        self._try(f"round {stopped.round}", self.tracker.on_stop, stopped)

    def on_error(self, error: DivergedError) -> None:
        """Pass on that the run diverged."""
        self._try(f"round {error.round}", self.tracker.on_error, error)

    def on_end(self, result: Any) -> None:
        """Pass the result on."""
        self._try("the end of the run", self.tracker.on_end, result)

    def close(self) -> None:
        """Close the tracker, also if it has failed."""
        failed, self._failed = self._failed, False
        self._try("closing", self.tracker.close, quiet=failed)

    def _try(self, when: str, call: Callable[..., Any], *arguments: Any, quiet: bool = False) -> Any:
        if self._failed:
            return None
        try:
            return call(*arguments)
        except Exception as error:
            self._failed = True
            if not quiet:
                self._report(
                    f"the tracker {self._name} failed in {when} and is left out from there on, "
                    f"while the run goes on: {in_words(error)}"
                )
            return None
