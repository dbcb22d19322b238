"""Local heads: clients share the body of a model, and each trains a head of its own.

Collins, Hassani, Mokhtari and Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning"
(FedRep, ICML 2021, arXiv:2102.07078). Here the shared body is that of the served model, which the rounds have trained.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from fedalign.errors import FedalignError
from fedalign.personal.method import Model, PersonalRequest, PersonalRun, Start, Train, head_of, parts_of
from fedalign.personal.passes import EarlyStopped


@dataclass(frozen=True)
class LocalHead(EarlyStopped):
    """Train the head of the served model on the client's own data; the weights of its body stay those of the server.

    A model names its head by a layer called ``head``, or by an attribute ``head`` with the name of a layer; the option
    ``head`` names another one. Buffers, such as BatchNorm's statistics, follow the client's data.

    >>> LocalHead().check(nn.Linear(4, 2))
    Traceback (most recent call last):
    fedalign.errors.FedalignError: local-head trains the head of a model, and this one names none: give the model an \
attribute head, or set head to the name of a layer
    """

    name: ClassVar[str] = "local-head"
    head: str = ""

    def check(self, model: nn.Module) -> None:
        """Refuse a model without a head."""
        if not (head := self.head or head_of(model)):
            raise FedalignError(
                "local-head trains the head of a model, and this one names none: give the model an attribute head, "
                "or set head to the name of a layer"
            )
        parts_of(tuple(name for name, p in model.named_parameters() if p.requires_grad), head)

    def personalise(self, start: Start) -> PersonalRun:
        """Train the head alone, and keep the pass that is best on held-out data."""

        def one_pass(model: Model, number: int) -> Generator[PersonalRequest, Any, Model | None]:
            return (yield Train(model, number, self.lr, only=self.head or start.head))

        return (yield from self.best_of(start.served, one_pass))
