"""The interface of personal methods, and what they ask of a driver.

A method is a generator for *one* client. It yields requests and is sent the replies, as an algorithm does. A simulation
answers the requests of all clients together; over Flower a node answers those of its own client. So the same code runs
in both, and the models that a node makes never leave it.
"""

from __future__ import annotations

import abc
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from fedalign.errors import FedalignError
from fedalign.rules.rule import Measure, Split

Model = Any  # a flat model: a torch tensor
Senders = Literal["all", "priority", "free"]


@dataclass(frozen=True)
class Train:
    """Train a model in one pass over the client's training data. The reply is a model, None if it is not finite.

    ``number`` counts the passes; it fixes the order of the batches. ``lr`` None is the learning rate of the client's
    last local step in the run, or with ``first_rate`` that of its first one. ``mu`` pulls towards the model
    ``towards``, by the term ``mu/2·‖v − towards‖²``. ``only`` names the part of the model that is trained, as
    ``state_dict`` does; empty: all of it.
    """

    model: Model
    number: int
    lr: float | None = None
    mu: float = 0.0
    towards: Model | None = None
    only: str = ""
    first_rate: bool = False


@dataclass(frozen=True)
class Measured:
    """Measure models on one split of the client's data. The reply is a list with a measure of each."""

    models: tuple[Model, ...]
    split: Split = "heldout"


@dataclass(frozen=True)
class Exchange:
    """Send a model to the other clients, and get theirs. The reply maps clients to finite models, without one's own.

    ``senders`` says whose models may be sent. Over Flower no client's model is sent to another, so methods that
    exchange models (:attr:`PersonalMethod.exchanges`) run in simulations alone.
    """

    model: Model
    senders: Senders = "all"


PersonalRequest = Train | Measured | Exchange


@dataclass(frozen=True)
class Start:
    """What a client starts from: the served model, the initial one, its number, the seed, the name of the head."""

    served: Model
    initial: Model
    client: int = 0
    seed: int = 0
    head: str = ""  #: empty where the model names none


@dataclass(frozen=True)
class Personalised:
    """A client's personal model, and the number of passes over its data that made it."""

    model: Model
    passes: int


PersonalRun = Generator[PersonalRequest, Any, Personalised]


class PersonalMethod(abc.ABC):
    """Makes a client's personal model of the served one. Subclass it and define :meth:`personalise`.

    >>> class OnePass(PersonalMethod):
    ...     def personalise(self, start):
    ...         trained = yield Train(start.served, 0)
    ...         return Personalised(trained, 1)
    >>> OnePass().label
    'OnePass'
    """

    name: ClassVar[str] = ""  #: what outputs call the method; empty: the name of the class
    exchanges: ClassVar[bool] = False  #: whether clients send each other models

    @property
    def needs_heldout(self) -> bool:
        """Whether every client must have held-out data."""
        return False

    @abc.abstractmethod
    def personalise(self, start: Start) -> PersonalRun:
        """Yield requests for one client, and return its personal model.

        It must be a function of ``start`` and the replies alone, so that a resumed run gives the same model.
        """

    def check(self, model: nn.Module) -> None:  # noqa: B027  (most methods serve every model)
        """Raise a :class:`FedalignError` for a model that the method cannot personalise. Called before any work."""

    @property
    def label(self) -> str:
        """The name of the method in outputs."""
        return self.name or type(self).__name__


@dataclass(frozen=True)
class PersonalOutcome:
    """A client's personal model as it was measured: on its test data and on its held-out data, where it has some.

    ``passes`` counts the passes over the client's data that made it; None: not known. ``model`` is kept where that was
    asked for.
    """

    test: Measure | None
    heldout: Measure | None
    passes: int | None
    model: Any = None


def head_of(model: nn.Module) -> str:
    """Return the name of a model's head: of a layer called ``head``, or of the one that its attribute ``head`` names.

    The name is empty where a model names no head.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    >>> net.head = "1"
    >>> head_of(net), head_of(nn.Linear(4, 2))
    ('1', '')
    """
    named = getattr(model, "head", "")
    return "head" if isinstance(named, nn.Module) else named if isinstance(named, str) else ""


def parts_of(names: tuple[str, ...], only: str) -> tuple[int, ...] | None:
    """Return the places of the tensors of a named part; None: all of them.

    Raises :class:`FedalignError` if there is no such part.

    >>> parts_of(("0.weight", "0.bias", "1.weight"), "0")
    (0, 1)
    """
    if not only:
        return None
    found = tuple(place for place, name in enumerate(names) if name == only or name.startswith(f"{only}."))
    if not found:
        raise FedalignError(f"the model has no trainable part {only!r}; it has {', '.join(names)}")
    return found


def methods_by_label(methods: list[PersonalMethod]) -> dict[str, PersonalMethod]:
    """Name methods by their labels; raises :class:`FedalignError` if two have the same one."""
    found: dict[str, PersonalMethod] = {}
    for method in methods:
        if not isinstance(method, PersonalMethod):
            raise FedalignError(f"personal must hold fedalign.PersonalMethod objects, not {method!r}")
        if method.label in found:
            raise FedalignError(f"personal has {method.label!r} twice; outputs tell methods apart by their names")
        found[method.label] = method
    return found
