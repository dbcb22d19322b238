"""What the protocol asks of its driver, and what it is told.

A model is opaque here: anything that can be scaled by a number and added (torch tensors, NumPy arrays, floats).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from fedalign.protocol.records import History, RoundRecord
from fedalign.rules.rule import Broadcast, Measure, Rule, Split

Model = Any
Job = tuple[Model, int]  # a model and the client that is to work with it


@dataclass(frozen=True)
class Evaluate:
    """Measure models on clients' data.

    ``ahead`` is the model that the same clients will be asked to measure next, on the data that is matched on: a driver
    that pays for every exchange may have it measured now.
    """

    jobs: tuple[Job, ...]
    split: Split
    ahead: Model | None = None


@dataclass(frozen=True)
class Train:
    """Train at clients. A free client first measures the model itself and asks ``rule.offers``."""

    jobs: tuple[Job, ...]
    round: int
    broadcast: Broadcast | None = None  # None: everybody trains, nobody is asked
    rule: Rule | None = None
    split: Split = "heldout"


@dataclass(frozen=True)
class Compare:
    """Compare the updates ``w_k − w`` of clients that sent one in the last ``Train`` with a mean of some of them."""

    reference: Mapping[int, float]
    clients: tuple[int, ...]


@dataclass(frozen=True)
class Combine:
    """Average the models of the last ``Train``: one mean for each mix, which gives its clients' weights.

    ``steps``, where there are any, say for each mix by how much a client's update is multiplied before. A simulation
    trains clients only now, and adds each model up when it is ready: it never holds them all.
    """

    mixes: tuple[Mapping[int, float], ...]
    steps: tuple[Mapping[int, float], ...] = ()

    def step(self, mix: int, k: int) -> float:
        """Give what client k's update is multiplied by in a mix."""
        return self.steps[mix].get(k, 1.0) if self.steps else 1.0


@dataclass(frozen=True)
class Combined:
    """The mixes' models, and the clients whose trained weights are not finite."""

    models: tuple[Model, ...]
    not_finite: tuple[int, ...] = ()


@dataclass(frozen=True)
class RoundDone:
    """A round is over; ``model`` is what the priority clients have now (the `local` run: one model per client)."""

    record: RoundRecord
    model: Model
    memory: tuple[Model, ...] = ()  # what else the next round needs


@dataclass(frozen=True)
class Update:
    """A client sends an update. ``own`` is its measure of the model it received (free clients only).

    ``model`` is there where nobody aggregates (``Train`` without a broadcast); else ``Combine`` asks for the mean.
    """

    model: Model | None = None
    own: Measure | None = None
    finite: bool = True


@dataclass(frozen=True)
class Declined:
    """A free client decided not to take part: it trained nothing and sends no weights."""

    own: Measure
    reason: str = ""  # where it isn't the rule that decided


@dataclass(frozen=True)
class Rejected:
    """A client's update came and is of no use: its shape, its type or its size is wrong, or it isn't finite."""

    own: Measure | None
    reason: str


@dataclass(frozen=True)
class Lost:
    """No answer came."""

    reason: str


Reply = Update | Declined | Rejected | Lost
Request = Evaluate | Train | Compare | Combine | RoundDone
Run = Generator[Request, Any, "Result"]


@dataclass(frozen=True)
class Result:
    """The end of a run: the final model and everything that happened."""

    model: Model
    history: History
