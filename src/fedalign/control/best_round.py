"""Keeps the model of the best round."""

from __future__ import annotations

import warnings
from typing import Any

from fedalign.callbacks import Callback, RunInfo
from fedalign.control.watched import Mode, Watched
from fedalign.errors import FedalignError, FederationWarning
from fedalign.experiments.recorder import named_tensors
from fedalign.experiments.store import RunStore
from fedalign.protocol.records import RoundRecord


class BestRound(Callback):
    """Keeps the served model of the best round by a figure, in ``best.safetensors`` of the run's folder.

    The file's metadata has ``round``, ``measure`` and ``value``. In Python the attributes ``model`` (a module in eval
    mode; in local-only training a list of them), ``round`` and ``value`` hold the same, with or without a folder. Of
    equal rounds the first is kept. ``metric`` and ``mode`` are as in :class:`EarlyStopping`; a figure of the model
    that a round starts from, such as ``global_loss``, is refused.

    >>> import fedalign as fa, torch
    >>> x, y = torch.randn(40, 4), torch.arange(40) % 2
    >>> fed = fa.Federation.from_arrays([(x[:20], y[:20]), (x[20:], y[20:])], priority=[True, False])
    >>> best = BestRound("accuracy")
    >>> options = {"metrics": ["accuracy(on='heldout')"], "callbacks": [best]}
    >>> result = fa.simulate(fed, lambda: torch.nn.Linear(4, 2), rounds=5, **options)
    >>> best.value == max(result.history.values("accuracy"))
    True
    """

    needs_model = False

    def __init__(self, metric: str = "test_accuracy", mode: Mode = "auto") -> None:
        if metric in ("global_loss", "global_accuracy"):
            raise FedalignError(
                f"{metric} is measured on the model that a round starts from; keep the best round by test_accuracy, "
                "test_loss, train_loss or a metric, such as accuracy(on='heldout')"
            )
        self.metric, self.mode = metric, mode
        self._watched = Watched(metric, mode)
        self._run: RunInfo | None = None
        self._better = False
        self.model: Any = None

    @property
    def round(self) -> int | None:
        """The best round so far."""
        return self._watched.round

    @property
    def value(self) -> float | None:
        """The best figure so far; None before the first round that has one."""
        return self._watched.best

    def check(self, run: RunInfo) -> None:
        """Refuse a figure that the run does not have."""
        self._watched.check(run)

    def on_start(self, run: RunInfo) -> None:
        """Find the best of the rounds before, whose model is in the folder already."""
        self._run, self._better, self.model = run, False, None
        self._watched.start()
        for record in run.past:
            self._watched.improves(record)
        if run.past and (run.folder is None or not RunStore(run.folder).best.exists()):
            warnings.warn(
                f"the model of the best round so far ({self.round}) was not kept; "
                f"the best one of the rounds from {run.start} on will be",
                FederationWarning,
                stacklevel=2,
            )
            self._watched.start()

    def wants_model(self, record: RoundRecord) -> bool:
        """Ask for the model of a round that is better than all before."""
        self._better = self._watched.improves(record)
        return self._better

    def on_round(self, record: RoundRecord, model: Any) -> None:
        """Keep the model of a better round, and write it if the run has a folder."""
        if not self._better:
            return
        assert self._run is not None
        self.model = model
        if self._run.folder is not None:
            names = [client.name for client in record.clients]
            about = {"round": str(record.round), "measure": self._watched.metric, "value": repr(self.value)}
            RunStore(self._run.folder).save_best(named_tensors(names, model), about)
