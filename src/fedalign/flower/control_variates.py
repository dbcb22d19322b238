"""SCAFFOLD over Flower: the server keeps the control variates of all clients.

It can, because a client's new variate follows from what the server sends and receives: ``c_k − c + (w − w_k)/Ση``. So
nodes keep no state that could be lost, a resumed run has the variates of its checkpoint, and a client that was not
admitted keeps its variate, as in a simulation. A client gets its correction ``c − c_k`` with the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import ArrayRecord, RecordDict

from fedalign.flower.members import Members
from fedalign.flower.wire import get_model, put_model
from fedalign.protocol.messages import Mix
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.scaffold import Controls
from fedalign.training.optimizer import LocalOptimizer

_RECORD = "correction"


class ControlVariates:
    """The control variates of a run. Without SCAFFOLD all methods do nothing."""

    def __init__(self, local: LocalOptimizer, layout: Layout, members: Members, rounds: int) -> None:
        self._local, self._layout, self._members, self._rounds = local, layout, members, rounds
        self._controls: Controls | None = None

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from the tensors of a snapshot; those of a new run have no variates, which then are zero."""
        if self._local.scaffold:
            self._controls = Controls(len(self._members.roster()), self._layout, torch.device("cpu"), tensors)

    def put(self, content: RecordDict, k: int) -> None:
        """Put client k's correction into a message."""
        if self._controls is not None:
            self._controls.grow(k + 1)
            part = RecordDict()
            put_model(part, self._controls.correction(k))
            content[_RECORD] = part["model"]

    def renew(self, received: torch.Tensor, updates: Mapping[int, torch.Tensor], mix: Mix, round: int) -> None:
        """Renew the variates of the clients whose updates are in a round's aggregate, and the server's."""
        if self._controls is None:
            return
        roster, samples = self._members.roster(), self._members.samples
        rates = {k: self._local.total_rate(round, self._rounds, samples(k)) for k in mix.shares}
        weight = float(sum(roster.p[k] for k in mix.shares if roster.priority[k]))
        self._controls.renew(received, {k: updates[k] for k in mix.shares}, mix.shares, rates, weight)

    def named(self) -> dict[str, torch.Tensor]:
        """Return all variates by name, for a snapshot."""
        return {} if self._controls is None else self._controls.named()


def get_correction(content: RecordDict, layout: Layout) -> torch.Tensor | None:
    """Return the correction of a message; None without SCAFFOLD. Raises :class:`FedalignError` if it is damaged."""
    record = content.get(_RECORD)
    if not isinstance(record, ArrayRecord):
        return None
    return get_model(RecordDict({"model": record}), layout.trainable_size, layout.dtype)
