"""What a round leaves to the next, and what it takes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fedalign.protocol.messages import Model
from fedalign.protocol.records import Fallback, RoundRecord
from fedalign.training.server import Branch


@dataclass(frozen=True)
class State:
    """What a round leaves to the next.

    ``served`` is what the priority clients have. The next round starts from ``base``, which is the same model with
    most rules; ``alone`` is the priority clients' own where the rule keeps a way back.
    """

    served: Model
    base: Branch
    alone: Branch | None = None
    fallback: Fallback = Fallback()

    @property
    def apart(self) -> bool:
        """Whether the next round starts from another model than this one serves."""
        return self.base.model is not self.served

    @property
    def memory(self) -> tuple[Model, ...]:
        """What is stored beside the model that is served."""
        base = (self.base.model,) if self.apart else ()
        alone = () if self.alone is None else (self.alone.model, *self.alone.memory)
        return (*base, *self.base.memory, *alone)

    @classmethod
    def restore(cls, model: Model, memory: tuple[Model, ...], last: RoundRecord | None) -> State:
        """Read :attr:`memory` back."""
        fallback = (last.fallback if last is not None else None) or Fallback()
        start, memory = (memory[0], memory[1:]) if last is not None and last.base else (model, memory)
        if not fallback.apart:
            return cls(model, Branch(start, memory), None, fallback)
        half = len(memory) // 2
        return cls(model, Branch(start, memory[:half]), Branch(memory[half], memory[half + 1 :]), fallback)


@dataclass
class Costs:
    """What a round takes. A model counts once for every client that it is sent to in the round.

    That a client measures it, and then trains it, makes no difference; reported test figures don't count.
    """

    work: tuple[int, ...] = ()  #: the samples that each client trains on
    down: int = 0
    up: int = 0
    samples: int = 0

    def sent(self, clients: Collection[int]) -> None:
        """Count the updates of clients, and what they trained on."""
        self.up += len(clients)
        self.samples += sum(self.work[k] for k in clients) if self.work else 0
