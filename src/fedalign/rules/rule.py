"""What a rule of inclusion is given and what it gives: measures, candidates, and the class to subclass.

A free client decides for itself whether to offer an update (``offers``), the server whether to admit it (``admits``).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Split = Literal["heldout", "train", "test"]
MatchOn = Literal["heldout", "train"]


@dataclass(frozen=True)
class Measure:
    """How a model did on one client's data: mean loss, accuracy (None where there are no classes), sample count."""

    loss: float
    accuracy: float | None
    samples: int


@dataclass(frozen=True)
class Broadcast:
    """What the server tells every client with the model: ``loss`` is ``F(w)``, ``accuracy`` its counterpart."""

    round: int
    loss: float
    accuracy: float | None = None
    epsilon: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A set of free clients that may be admitted, and the ε that it belongs to.

    A free client's weight is ``p_k``, or ``weight`` where that names it (the priority clients have 1 together), times
    ``scale``; weights are then normalised. ``step`` multiplies a client's update after that. ``reasons`` say why
    somebody is in or out.
    """

    epsilon: float | None
    clients: tuple[int, ...]
    weight: Mapping[int, float] = field(default_factory=dict)
    scale: Mapping[int, float] = field(default_factory=dict)
    step: Mapping[int, float] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Similarity:
    """A client's update against the mean update of the priority clients: the cosine, and the ratio of the lengths."""

    cosine: float
    length: float


class Rule(abc.ABC):
    """A rule of inclusion for free clients. Subclass it and define :meth:`offers` and :meth:`admits`.

    Both must be functions of their arguments alone: the simulator asks ``admits`` before it trains a client, so as not
    to train one that will be refused. Priority clients are never asked; they always take part.

    >>> class Better(Rule):
    ...     def offers(self, own, broadcast):
    ...         return own.loss <= broadcast.loss
    ...     def admits(self, own, broadcast):
    ...         return own.loss <= broadcast.loss
    >>> Better().offers(Measure(0.5, 0.9, 10), Broadcast(round=0, loss=0.7))
    True
    """

    invites_free: bool = True  #: False: free clients aren't even sent the model
    needs_accuracy: bool = False  #: True: a clear error where the task has no accuracy
    needs_updates: bool = False  #: True: the rule judges updates (:meth:`compare`, :meth:`base`), not losses alone
    fallback: bool = False  #: True: FedAvg on the priority clients is kept beside, as a way back from bad choices
    match_on: MatchOn | None = None  #: the data F and F_k are measured on; None: held-out where there is any

    @abc.abstractmethod
    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Decide, on the client, whether to train and send an update."""

    @abc.abstractmethod
    def admits(self, own: Measure, broadcast: Broadcast) -> bool:
        """Decide, on the server, whether the update enters the aggregate."""

    def candidates(self, own: Mapping[int, Measure], broadcast: Broadcast) -> list[Candidate]:
        """Give the sets of free clients to try, smaller ones first; ``own`` are the measures of those that offer.

        Of several, the priority clients choose (:meth:`choose`).
        """
        return [Candidate(broadcast.epsilon, tuple(k for k, mine in own.items() if self.admits(mine, broadcast)))]

    def compare(
        self, own: Mapping[int, Measure], similar: Mapping[int, Similarity], broadcast: Broadcast
    ) -> list[Candidate]:
        """In place of :meth:`candidates`, for a rule that ``needs_updates``."""
        return self.candidates(own, broadcast)

    def base(
        self, own: Mapping[int, Measure], similar: Mapping[int, Similarity], broadcast: Broadcast
    ) -> Mapping[int, str] | None:
        """Name the free clients of the base, the model that the next round starts from, and why; None: the chosen one.

        Only a rule that ``needs_updates`` is asked.
        """
        return None

    def choose(
        self, candidates: Sequence[Candidate], measures: Sequence[Mapping[int, Measure]], p: Mapping[int, float]
    ) -> int:
        """Choose a candidate by the priority clients' measures of the aggregates on their held-out data.

        Here, the one with the lowest ``p_k``-weighted loss; on a tie the smaller set.
        """
        losses = [math.fsum(p[k] * mine.loss for k, mine in of_one.items()) for of_one in measures]
        return min(range(len(candidates)), key=lambda i: (losses[i], len(candidates[i].clients)))

    def epsilon_at(self, round: int, rounds: int) -> float | None:
        """Give the round's ε, or None if the rule has none."""
        return None

    def check(self, rounds: int) -> None:
        """Refuse, before any work, settings that fail in some round."""
        return

    def why(self, own: Measure, broadcast: Broadcast, admitted: bool) -> str:
        """Say in a few words why a free client was let in or not."""
        return f"loss {own.loss:.4g} against F {broadcast.loss:.4g}"
