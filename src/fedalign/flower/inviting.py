"""Invites clients over the Grid to train, and reads the models that they send."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import RecordDict

from fedalign.flower.control_variates import ControlVariates
from fedalign.flower.members import Members
from fedalign.flower.model_cache import digest
from fedalign.flower.shipping import Order, Shipping
from fedalign.flower.wire import TRAIN, put_task
from fedalign.protocol.messages import Invite, Lost


class Inviting:
    """Sends invitations. Where a second model is announced, priority clients train both in the same exchange."""

    def __init__(self, shipping: Shipping, members: Members, rounds: int, controls: ControlVariates) -> None:
        self._shipping, self._members, self._rounds, self._controls = shipping, members, rounds, controls
        self._second = ""  # the digest of the model that was trained beside another
        self._answers: Mapping[int, RecordDict | Lost] = {}  # of the clients that trained it
        self._received: dict[int, list[torch.Tensor]] = {}  # the models that each client has trained
        self._place = 0  # of the invitation's model among them

    def ask(self, request: Invite, declined: Mapping[int, Lost]) -> dict[int, RecordDict | Lost]:
        """Return the clients' answers, or why there is none; of a model that they trained before, those of then.

        Clients that ``declined`` are not asked.
        """
        if digest(request.model) == self._second and self._answers.keys() >= set(request.clients):
            answers = {k: self._answers[k] for k in request.clients}
            self._second, self._answers, self._place = "", {}, 1
            return answers
        second, clients = request.beside or (None, ())
        orders = {}
        for k in [k for k in request.clients if k not in declined]:
            models = [request.model] if second is None or k not in clients else [request.model, second]
            content, priority = RecordDict(), self._members.is_priority(k)
            put_task(content, k, request.broadcast.round, self._rounds, request.split, priority, request.broadcast)
            self._controls.put(content, k)
            orders[k] = Order(models, content)
        answers = {**self._shipping(TRAIN, orders, "training"), **declined}
        sent = {id(model): self._shipping.sent(model) for order in orders.values() for model in order.models}
        self._received = {k: [sent[id(model)] for model in order.models] for k, order in orders.items()}
        self._second, self._place = "" if second is None else digest(second), 0
        self._answers = {k: answers[k] for k in clients if k in answers}
        return answers

    def update(self, k: int, answer: RecordDict) -> torch.Tensor:
        """Return the model that a client trained; raises :class:`FedalignError` if it sent something else."""
        return self._shipping.updates(answer, self._received[k])[self._place]
