"""What an algorithm asks of its driver, and what the driver answers.

An algorithm is a generator. It yields these requests; the driver (the simulator, or a server over Flower) sends back
the reply that each request names. Every request means the same in both drivers.

A model is opaque here: anything that can be scaled by a number and added (torch tensors, NumPy arrays, floats).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from fedalign.protocol.records import History, RoundRecord
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Broadcast, Measure, Rule, Similarity, Split

Model = Any
Measures = dict[int, Measure]  # by client


@dataclass(frozen=True)
class WhoIsThere:
    """Ask which clients can be reached in a round. The reply is :class:`Present`.

    ``purpose`` tells those that train from those that only evaluate models for a decision of the round.
    """

    round: int
    purpose: Literal["train", "evaluate"] = "train"


@dataclass(frozen=True)
class Present:
    """The clients that can be reached in a round, and the roster as it stands in this round.

    ``draws`` says how often each priority client was drawn, where clients are drawn with replacement (Theorem 2).
    ``excluded`` says why the driver does not reach a client: ``Refused`` if it sent nonsense, else ``Lost``.

    >>> roster = Roster(("a", "b", "c"), (True, False, False), (30, 20, 10))
    >>> present = Present(roster, (True, True, False))
    >>> present.priority, present.free
    ((0,), (1,))
    """

    roster: Roster
    reachable: tuple[bool, ...]
    draws: Mapping[int, int] | None = None
    excluded: Mapping[int, Lost | Refused] = field(default_factory=dict)

    @cached_property
    def priority(self) -> tuple[int, ...]:
        """The reachable priority clients."""
        return tuple(k for k, here in enumerate(self.reachable) if here and self.roster.priority[k])

    @cached_property
    def free(self) -> tuple[int, ...]:
        """The reachable free clients."""
        return tuple(k for k, here in enumerate(self.reachable) if here and not self.roster.priority[k])


@dataclass(frozen=True)
class Evaluate:
    """Let clients measure models on one split of their data.

    ``asked`` holds pairs of a model and the clients that measure it. The reply is a list with one entry for each pair:
    the measures of the clients that answered. ``ahead`` names models, each with a split, that the same clients will be
    asked about next, and ``paired`` two models that they will be asked to compare on the same split
    (:class:`Paired`). A driver that pays for every exchange may have all that measured now. ``for_record`` says that no
    decision depends on the reply: a client that has just been asked in vain need not be asked again. With ``tempered``,
    measures have the losses at other temperatures as well (``calibration.py``); with ``quick``, a driver may compute
    those faster and round them differently.
    """

    asked: tuple[tuple[Model, tuple[int, ...]], ...]
    split: Split
    ahead: tuple[tuple[Model, Split], ...] = ()
    paired: tuple[Model, Model] | None = None
    for_record: bool = False
    tempered: bool = False
    quick: bool = False


@dataclass(frozen=True)
class Paired:
    """Let clients classify the same samples with two models. The reply maps a client to its :class:`Outcomes`.

    Clients that do not answer or have no such samples are missing. A task without classes has an empty reply.
    """

    models: tuple[Model, Model]
    clients: tuple[int, ...]
    split: Split


@dataclass(frozen=True)
class Outcomes:
    """How two models did on the same samples of a client.

    ``gained`` counts the samples that only the first model classifies correctly, ``lost`` those that only the second
    does. Where a sample has several positions, such as a sequence, it counts with the part in which the models differ.

    >>> Outcomes(gained=3, lost=1, samples=40)
    Outcomes(gained=3, lost=1, samples=40)
    """

    gained: float
    lost: float
    samples: int


@dataclass(frozen=True)
class Invite:
    """Send a model to clients and ask who takes part. The reply maps every invited client to a :data:`Reply`.

    A free client measures the model and asks ``rule.offers``; a priority client always takes part. The updates stay
    with the driver until :class:`Compare` or :class:`Aggregate` asks for them. A simulation trains the clients only
    then.

    ``beside`` names another model, with clients of this invitation that will be invited with it later in the round. A
    driver that pays for every exchange may have it trained now.
    """

    model: Model
    clients: tuple[int, ...]
    broadcast: Broadcast
    rule: Rule
    split: Split
    beside: tuple[Model, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Compare:
    """Compare updates ``w_k − w`` of the last :class:`Invite` with a weighted mean of some. The reply: ``Compared``."""

    reference: Mapping[int, float]
    clients: tuple[int, ...]


@dataclass(frozen=True)
class Compared:
    """How each update compares with the reference.

    ``refused`` updates failed the server's checks; the reasons say why.
    """

    similarities: Mapping[int, Similarity]
    refused: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Mix:
    """The shares of clients in an aggregate, which sum to 1.

    ``step`` multiplies a client's update before aggregation. With an ``anchor``, trusted clients among those of the
    mix, the numbers that are not trained (BatchNorm's statistics) are those of the anchor alone. ``within`` then limits
    every coordinate of the others' updates to the anchor's mean, plus or minus so many of its standard deviations.
    """

    shares: Mapping[int, float]
    step: Mapping[int, float] = field(default_factory=dict)
    anchor: tuple[int, ...] = ()
    within: float = math.inf


@dataclass(frozen=True)
class Resemble:
    """Compare updates of the last :class:`Compare` with each other. The reply maps two clients to a cosine.

    The updates are those of the mix's clients, bounded as in an aggregate, less their mean update. Pairs are ordered by
    the clients' numbers. A driver keeps the updates for an aggregate.
    """

    mix: Mix


@dataclass(frozen=True)
class Cosines:
    """Compare updates of the last :class:`Compare` with each other. The reply maps two clients to a cosine.

    Pairs are ordered by the clients' numbers. With ``previous``, a model of an earlier round, the server's step from
    there to the received model is compared as well, as client −1. An update of length 0 has the cosine 0 with all.
    """

    clients: tuple[int, ...]
    previous: Model | None = None


@dataclass(frozen=True)
class Aggregate:
    """Aggregate updates of the last :class:`Invite`, once for each mix. The reply is :class:`Aggregated`.

    With ``again``, another aggregate of the same updates follows, so a driver keeps those that it has compared.
    """

    mixes: tuple[Mix, ...]
    again: bool = False


@dataclass(frozen=True)
class Aggregated:
    """One model for each mix. If ``refused`` names clients, there are no models: ask again without those clients."""

    models: tuple[Model, ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainAlone:
    """Train each client's own model on its own data. The reply maps a client to its model, None if not finite."""

    models: Mapping[int, Model]
    round: int


@dataclass(frozen=True)
class Snapshot:
    """Everything a run needs to go on after ``round`` rounds: tensors by name, and a few values for JSON.

    ``tensors["model"]`` is the model that the priority clients are served.
    """

    round: int
    tensors: Mapping[str, Model]
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundDone:
    """A round is over. ``model`` is what is served now (local-only training: a model for each client)."""

    record: RoundRecord
    model: Model
    snapshot: Snapshot


@dataclass(frozen=True)
class Offered:
    """A client takes part. ``own`` is a free client's measure of the model; priority clients have none."""

    own: Measure | None = None


@dataclass(frozen=True)
class Declined:
    """A client decided not to take part: it trained nothing and sends no weights.

    ``reason`` is empty where the rule decided. ``own`` is None where the client did not even measure the model.
    """

    own: Measure | None
    reason: str = ""


@dataclass(frozen=True)
class Refused:
    """A client sent an update that failed the server's checks: its shape, type or length is wrong, or not finite."""

    own: Measure | None
    reason: str


@dataclass(frozen=True)
class Lost:
    """No usable answer came; ``reason`` says why."""

    reason: str


Reply = Offered | Declined | Refused | Lost
Request = WhoIsThere | Evaluate | Paired | Invite | Compare | Resemble | Cosines | Aggregate | TrainAlone | RoundDone
Run = Generator[Request, Any, "Result"]


@dataclass(frozen=True)
class Result:
    """The end of a run: the final model and everything that happened."""

    model: Model
    history: History
