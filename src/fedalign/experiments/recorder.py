"""The callback that writes a run into its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedalign.callbacks import Callback, Stopped
from fedalign.data.client import Client
from fedalign.data.federation import Federation
from fedalign.errors import DivergedError
from fedalign.experiments.store import Mark, RunStore
from fedalign.personal.method import PersonalOutcome
from fedalign.protocol.messages import Snapshot
from fedalign.protocol.records import ClientRound, RoundRecord
from fedalign.simulation.simulation import SimulationResult


class Recorder(Callback):
    """Writes rounds as they come, checkpoints, and the final model.

    A round whose model has a loss or a number that is not finite is written into the log and is no checkpoint: a run
    cannot go on from it. The last good round before it stays the checkpoint.
    ``every`` says after how many rounds a checkpoint is written; the last one before an interruption always is.
    Without a ``federation``, as over Flower, the last round tells who the clients are.
    """

    needs_model = False

    def __init__(self, store: RunStore, federation: Federation | None, rounds: int, every: int = 1) -> None:
        self._store, self._federation, self._rounds, self._every = store, federation, rounds, every
        self._pending: tuple[Mark, Snapshot] | None = None

    def on_snapshot(self, record: RoundRecord, snapshot: Snapshot) -> None:
        """Write the round into the log, and a checkpoint when one is due."""
        mark = self._store.append(record)
        if has_finite_losses(record):
            self._pending = mark, snapshot
        if mark.rounds % self._every == 0 or mark.rounds == self._rounds:
            self.close()

    def on_error(self, error: DivergedError) -> None:
        """Remember that the run diverged, so that a resume does not repeat it."""
        self._store.mark_diverged(error)

    def on_stop(self, stopped: Stopped) -> None:
        """Make the last round a checkpoint, and remember that the run stopped there, so that a resume leaves it."""
        self.close()
        self._store.mark_stopped(stopped)

    def on_end(self, result: SimulationResult) -> None:
        """Write the final weights, and the final model's accuracy and loss on every client's test data."""
        if result.error is not None:
            return
        clients = self._federation.clients if self._federation is not None else result.history.rounds[-1].clients
        rows = with_personal(client_rows(clients, result), result.personal)
        if rows or self._federation is not None:  # over Flower, all clients may have gone by now
            self._store.save_clients(rows)
        names = self._federation.roster.names if self._federation is not None else ()
        for method, outcomes in result.personal.items():
            models = [None if outcome is None else outcome.model for outcome in outcomes]
            if names and all(model is not None for model in models):
                self._store.save_personal(method, named_tensors(names, models))
        self._store.save_model(named_tensors(names, result.model))

    def close(self) -> None:
        """Make the last finished round a checkpoint."""
        if self._pending is not None:
            (mark, snapshot), self._pending = self._pending, None
            if is_finite(snapshot):
                self._store.checkpoint(mark, snapshot)


def has_finite_losses(record: RoundRecord) -> bool:
    """Say whether all losses that the priority clients measured of a round's model are finite."""
    return all(loss is None or math.isfinite(loss) for loss in (record.test_loss, record.train_loss))


def is_finite(snapshot: Snapshot) -> bool:
    """Say whether all numbers of a snapshot are finite.

    >>> is_finite(Snapshot(3, {"model": torch.tensor([1.0, torch.nan])}))
    False
    """
    return all(bool(torch.isfinite(torch.as_tensor(tensor)).all()) for tensor in snapshot.tensors.values())


def client_rows(clients: Sequence[Client | ClientRound], result: SimulationResult) -> list[dict[str, Any]]:
    """Return the lines of ``clients.json``: every client's test figures with the final model."""
    return [
        {
            "id": k,
            "name": client.name,
            "priority": client.priority,
            "test_accuracy": measure.accuracy,
            "test_loss": measure.loss if math.isfinite(measure.loss) else None,
            "test_samples": measure.samples,
        }
        for k, (client, measure) in enumerate(zip(clients, result.clients, strict=True))
        if measure is not None
    ]


def with_personal(
    rows: Sequence[dict[str, Any]], personal: Mapping[str, Sequence[PersonalOutcome | None]]
) -> list[dict[str, Any]]:
    """Add to the lines of ``clients.json`` what every client's personal models do, by the method's name."""
    if not personal:
        return list(rows)
    found = []
    for row in rows:
        own = {name: outcomes[row["id"]] for name, outcomes in personal.items()}
        found.append({**row, "personal": {name: _figures(one) for name, one in own.items() if one is not None}})
    return found


def _figures(outcome: PersonalOutcome) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for split, measure in (("test", outcome.test), ("heldout", outcome.heldout)):
        figures[f"{split}_accuracy"] = None if measure is None else measure.accuracy
        finite = measure is not None and math.isfinite(measure.loss)
        figures[f"{split}_loss"] = measure.loss if measure is not None and finite else None
    return {**figures, "passes": outcome.passes}


def named_tensors(clients: Sequence[str], model: Any) -> dict[str, torch.Tensor]:
    """Name a run's final weights; where every client has a model, by the client too."""
    if isinstance(model, torch.nn.Module):
        return {key: value.contiguous() for key, value in model.state_dict().items()}
    return {
        f"{name}.{key}": value.contiguous()
        for name, module in zip(clients, model, strict=True)
        for key, value in module.state_dict().items()
    }
