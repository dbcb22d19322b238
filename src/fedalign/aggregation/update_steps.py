"""What update steps are: on the client before it sends, and on the server before it aggregates."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedalign.errors import FedalignError


@dataclass(frozen=True)
class UpdateContext:
    """Where an update comes from; a step that draws random numbers hashes these."""

    seed: int
    round: int
    client: int


class ClientStep(abc.ABC):
    """A step on the client, after training and before sending: clip, add noise, quantise. Define :meth:`apply`.

    >>> class Half(ClientStep):
    ...     def apply(self, update, context):
    ...         return update / 2
    >>> Half().apply(torch.tensor([2.0, 4.0]), UpdateContext(seed=0, round=0, client=3))
    tensor([1., 2.])
    """

    @abc.abstractmethod
    def apply(self, update: torch.Tensor, context: UpdateContext) -> torch.Tensor:
        """Return the update to send, given the trainable part of ``w_k − w``."""


class ServerStep(abc.ABC):
    """A step on the server, on every free client's update before it is aggregated. Define :meth:`refuses`.

    Lengths are Euclidean, of the trainable part of ``w_k − w``. The priority clients' lengths are the reference.
    """

    @abc.abstractmethod
    def refuses(self, length: float, priority_lengths: Sequence[float]) -> str | None:
        """Return why an update of this length is refused; None if it is not."""


def sent_model(
    model: torch.Tensor, received: torch.Tensor, steps: Sequence[ClientStep], context: UpdateContext, size: int
) -> torch.Tensor:
    """Apply client steps to a trained model, whose first ``size`` numbers are trainable; return what is sent."""
    if not steps:
        return model
    update = model[:size] - received[:size]
    for step in steps:
        changed = step.apply(update, context)
        if not isinstance(changed, torch.Tensor) or changed.shape != update.shape:
            shape = tuple(changed.shape) if isinstance(changed, torch.Tensor) else type(changed).__name__
            raise FedalignError(
                f"{type(step).__name__}.apply must return a tensor of {tuple(update.shape)}, not {shape}"
            )
        update = changed
    sent = model.clone()
    sent[:size] = received[:size] + update
    return sent
