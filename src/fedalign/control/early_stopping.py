"""Stops a run that no longer improves."""

from __future__ import annotations

from typing import Any

from fedalign.callbacks import Callback, RunInfo
from fedalign.control.watched import Mode, Watched
from fedalign.errors import FedalignError
from fedalign.protocol.records import RoundRecord


class EarlyStopping(Callback):
    """Stops a run when a figure has not improved for ``patience`` rounds. The result is kept as of any other run.

    ``metric`` is a number of the rounds' records, such as ``"global_loss"`` (the loss on the priority clients'
    held-out data) or ``"test_accuracy"``, or one of the run's metrics, ``"f1"`` or ``"f1.free"``. ``mode`` and
    ``min_delta`` say what is better; the first ``start`` rounds do not count. ``goal`` ends the run at once when the
    figure reaches it. An interrupted run goes on counting where it was. Stacked with others, only this run stops.

    >>> import fedalign as fa, torch
    >>> x, y = torch.ones(40, 4), torch.arange(40) % 2
    >>> fed = fa.Federation.from_arrays([(x[:20], y[:20]), (x[20:], y[20:])], priority=[True, False])
    >>> stop = EarlyStopping("train_loss", patience=3, min_delta=0.01)
    >>> result = fa.simulate(fed, lambda: torch.nn.Linear(4, 2), rounds=50, callbacks=[stop])
    >>> print(len(result.history) < 50, result.stopped is not None)
    True True
    """

    needs_model = False

    def __init__(
        self,
        metric: str = "global_loss",
        patience: int = 10,
        min_delta: float = 0.0,
        mode: Mode = "auto",
        start: int = 0,
        goal: float | None = None,
    ) -> None:
        if patience < 1:
            raise FedalignError(f"patience must be at least 1 round, not {patience!r}")
        if start < 0:
            raise FedalignError(f"start must be a round, 0 or more, not {start!r}")
        self._watched = Watched(metric, mode, min_delta)
        self.metric, self.mode, self.min_delta = metric, mode, min_delta
        self.patience, self.start, self.goal = patience, start, goal
        self._since = 0  # rounds without an improvement
        self._reached = False

    def check(self, run: RunInfo) -> None:
        """Refuse a figure that the run does not have."""
        self._watched.check(run)

    def on_start(self, run: RunInfo) -> None:
        """Count the rounds before, if the run goes on; one that had stopped and is continued is given a new chance."""
        self._watched.start()
        self._since, self._reached = 0, False
        for record in run.past:
            self.on_round(record, None)
        if self.should_stop() is not None:
            self._since, self._reached = 0, False

    def on_round(self, record: RoundRecord, model: Any) -> None:
        """Compare the round's figure with the best so far."""
        if record.round < self.start:
            return
        better = self._watched.improves(record)
        self._since = 0 if better else self._since + 1
        best, sign = self._watched.best, self._watched.sign
        self._reached = self.goal is not None and best is not None and sign * (best - self.goal) >= 0

    def should_stop(self) -> str | None:
        """Say that the figure has not improved for too long, or that it has reached the goal."""
        watched = self._watched
        if self._reached:
            return f"{watched.metric} has reached {self.goal:g}: it is {watched.best:.6g} in round {watched.round}"
        if self._since < self.patience:
            return None
        rounds = "1 round" if self.patience == 1 else f"{self.patience} rounds"
        return f"{watched.metric} has not improved in {rounds}; the best is {watched.best:.6g} in round {watched.round}"
