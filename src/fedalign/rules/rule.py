"""What a rule of inclusion is: the class to subclass, what it is given and what it returns.

A free client decides for itself whether to offer an update (:meth:`Rule.offers`). The server decides which offers are
admitted, with which weight and why (:meth:`Rule.select`).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fedalign.rules import legacy

Split = Literal["heldout", "train", "test"]
MatchOn = Literal["heldout", "train"]


@dataclass(frozen=True)
class Measure:
    """How a model did on one client's data: mean loss, accuracy (None where there are no classes), sample count.

    ``tempered``, if asked for, has the mean losses with the outputs divided by each of several temperatures.
    """

    loss: float
    accuracy: float | None
    samples: int
    tempered: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Broadcast:
    """What the server tells every client with the model: ``loss`` is ``F(w)``, ``accuracy`` its counterpart."""

    round: int
    loss: float
    accuracy: float | None = None
    epsilon: float | None = None


@dataclass(frozen=True)
class Similarity:
    """A client's update against the mean update of the priority clients: the cosine, and the ratio of the lengths.

    >>> Similarity(cosine=0.0, length=1.0).distance
    2.0
    """

    cosine: float
    length: float

    @property
    def distance(self) -> float:
        """The squared distance of the two updates, as a multiple of the mean update's squared length."""
        return 1.0 + self.length**2 - 2.0 * self.length * self.cosine


@dataclass(frozen=True)
class Offer:
    """What the server knows of a free client that offers an update: its own measure of the model that it received.

    ``similarity`` is there for rules that need updates (:attr:`Rule.needs_updates`), else None. ``noise`` then says how
    well the priority clients know their own direction: the variance of their mean update over its squared length,
    estimated from how much their updates differ. It is None where fewer than two of them sent an update. The server has
    not verified the measure.
    """

    measure: Measure
    similarity: Similarity | None = None
    noise: float | None = None

    @property
    def cosine(self) -> float:
        """The cosine of the update with the priority clients' mean update; 0 where updates were not compared."""
        return self.similarity.cosine if self.similarity is not None else 0.0

    @property
    def length(self) -> float:
        """The length of the update, as a multiple of the priority clients' mean update's; 0 where not compared."""
        return self.similarity.length if self.similarity is not None else 0.0


@dataclass(frozen=True)
class Selection:
    """The free clients that the server admits, their weights, and the reasons.

    A client's weight is ``p_k``, or ``weight[k]`` where given (all priority clients together have weight 1), times
    ``scale[k]``; weights are then normalised. ``step[k]`` multiplies the client's update before that. ``reasons`` say
    why an offer was admitted or not; where one is missing, :meth:`Rule.why` gives it. ``epsilon`` is the ε that this
    selection belongs to, if another than the round's.

    >>> Selection((3, 5), weight={3: 0.1}, reasons={4: "too few samples"}).clients
    (3, 5)
    """

    clients: tuple[int, ...] = ()
    weight: Mapping[int, float] = field(default_factory=dict)
    scale: Mapping[int, float] = field(default_factory=dict)
    step: Mapping[int, float] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)
    epsilon: float | None = None


class Rule(abc.ABC):
    """A rule of inclusion for free clients. Subclass it and define :meth:`offers` and :meth:`select`.

    Both must be functions of their arguments alone. Priority clients are never asked; they always take part.

    >>> class Better(Rule):
    ...     def offers(self, own, broadcast):
    ...         return own.loss <= broadcast.loss
    ...     def select(self, offers, broadcast):
    ...         return Selection(tuple(k for k, offer in offers.items() if offer.measure.samples >= 20))
    >>> F = Broadcast(round=0, loss=0.7)
    >>> Better().offers(Measure(0.5, 0.9, 10), F)
    True
    >>> Better().select({2: Offer(Measure(0.5, 0.9, 10)), 3: Offer(Measure(0.6, 0.9, 40))}, F).clients
    (3,)
    """

    algorithm: ClassVar[str] = "fedalign"  #: the algorithm that runs this rule: a name of the registry
    invites_free: bool = True  #: False: free clients are not even sent the model
    needs_accuracy: bool = False  #: True: a task without classes is refused before any work
    needs_updates: bool = False  #: True: offers carry a :class:`Similarity`, so every client that offers is trained
    evaluates: bool = False  #: True: priority clients measure models on held-out data for the rule's decisions
    match_on: MatchOn | None = None  #: the data F and F_k are measured on; None: held-out where there is any

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        legacy.adopt(cls)

    @abc.abstractmethod
    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Decide, on the client, whether to train and send an update."""

    def select(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> Selection:
        """Decide, on the server, whose updates enter the aggregate, with which weight and why.

        ``offers`` holds the free clients that offered, by number. Every rule defines this method; this default
        supports rules that were written for version 0.1.
        """
        return legacy.select(self, offers, broadcast)

    def epsilon_at(self, round: int, rounds: int) -> float | None:
        """Return the round's ε, or None if the rule has none."""
        return None

    def check(self, rounds: int) -> None:
        """Raise :class:`~fedalign.FedalignError`, before any work, for settings that fail in some round."""
        legacy.check(self)

    def why(self, own: Measure, broadcast: Broadcast, admitted: bool) -> str:
        """Say in a few words why a free client was admitted or not."""
        return f"loss {own.loss:.4g} against F {broadcast.loss:.4g}"
