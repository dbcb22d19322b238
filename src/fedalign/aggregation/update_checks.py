"""The checks that every update passes before it is aggregated. Both drivers use them; nothing else checks updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fedalign.aggregation.buffer_checks import BufferFacts, wrong_buffers
from fedalign.aggregation.update_steps import ServerStep

NOT_FINITE = "its trained weights are not finite"


@dataclass(frozen=True)
class UpdateFacts:
    """What the checks look at: whether all numbers are finite, the length of the update, and the model's buffers.

    ``buffers`` is None for a model that has none.
    """

    finite: bool
    length: float = 0.0
    buffers: BufferFacts | None = None


def wrong_format(shape: tuple[int, ...], dtype: str, size: int, wanted: str) -> str | None:
    """Return why a received array cannot be models of ``size`` numbers of type ``wanted``; None if it can.

    >>> wrong_format((7,), "float32", 8, "float32")
    'its model has shape (7,), not (8,)'
    """
    if dtype != wanted:
        return f"its model is of type {dtype}, not {wanted}"
    if len(shape) not in (1, 2) or shape[-1] != size:
        return f"its model has shape {shape}, not {(size,)}"
    return None


def length_of(model: torch.Tensor, received: torch.Tensor, size: int) -> torch.Tensor:
    """Return the length of an update's trainable part, its first ``size`` numbers, as a tensor on their device."""
    length: torch.Tensor = torch.linalg.vector_norm((model[:size] - received[:size]).double())
    return length


def refusals(facts: Mapping[int, UpdateFacts], priority: Iterable[int], steps: Sequence[ServerStep]) -> dict[int, str]:
    """Return the clients whose updates are refused, with the reasons.

    An update that is not finite is refused. A free client's is also refused for buffers that honest training does not
    give, and if one of the server's steps refuses it.

    >>> from fedalign.aggregation.length_bound import LengthBound
    >>> facts = {0: UpdateFacts(True, 1.0), 1: UpdateFacts(True, 20.0), 2: UpdateFacts(False)}
    >>> sorted(refusals(facts, [0], [LengthBound(10)]))
    [1, 2]
    """
    found = {k: NOT_FINITE for k, fact in facts.items() if not fact.finite}
    roots = set(priority)
    trusted = [fact for k, fact in facts.items() if k in roots and k not in found]
    lengths = [fact.length for fact in trusted]
    buffers = [fact.buffers for fact in trusted if fact.buffers is not None]
    for k, fact in facts.items():
        if k not in found and k not in roots:
            wrong = None if fact.buffers is None else wrong_buffers(fact.buffers, buffers)
            reasons = (step.refuses(fact.length, lengths) for step in steps)
            reason = wrong or next((why for why in reasons if why), None)
            if reason:
                found[k] = str(reason)
    return found
