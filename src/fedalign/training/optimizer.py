"""Local work: what a client does with the model that it received, whichever optimiser it uses.

:class:`LocalOptimizer` says how long a client trains, on which batches and at which rate. A subclass adds the update
rule. The engines train many clients at once, so a rule works on *stacked* tensors: the clients are the first dimension
of every tensor. The engines do what comes before the rule: the proximal term ``mu``, clipping and weight decay.
"""

# No `from __future__ import annotations` here: subclasses in other modules inherit these fields, and the types of their
# constructors' arguments are looked up (in a user's module, too), so they must be types and not text.
import abc
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from fedalign.errors import FedalignError
from fedalign.training.schedules import Schedulable, Schedule, as_schedule, values

Rate = float | torch.Tensor  #: a learning rate: one number for all clients, or a vector with one per client
State = Mapping[str, Sequence[torch.Tensor]]  #: what a rule remembers between steps, by name


@dataclass(frozen=True)
class LocalOptimizer(abc.ABC):
    """Local work: ``epochs`` passes over the client's data, or ``steps`` batches of it, with some optimiser.

    Every step computes ``g = ∇loss + mu·(w_k − w)``, clips it to norm ``clip``, applies ``weight_decay`` and calls
    :meth:`update`. A subclass gives :meth:`update`, and :meth:`state` where the rule remembers something between steps.
    It is a frozen dataclass, and its fields are its options:

    >>> @dataclass(frozen=True)
    ... class SignSGD(LocalOptimizer):
    ...     def update(self, parameters, gradients, state, rate):
    ...         for p, g in zip(parameters, gradients, strict=True):
    ...             descend(p, g.sign(), rate)
    >>> stack = [torch.zeros(2, 3)]
    >>> SignSGD(lr=0.1, epochs=5).update(stack, [torch.tensor([[1.0, -2.0, 0.0]] * 2)], {}, 0.5)
    >>> stack[0][0].tolist()
    [-0.5, 0.5, 0.0]
    """

    lr: Schedulable  #: learning rate: a number, a schedule, or a callable of the round
    epochs: int | None = None  #: passes over the data in a round; exactly one of epochs and steps
    steps: int | None = None  #: batches in a round, continuing into further passes where needed
    batch_size: int | Literal["full"] | None = 50  #: "full" or None: all of a client's samples in one batch
    fresh: bool = False  #: draw every batch of `steps` anew, as the theory has it, not in passes over the data
    weight_decay: float = field(default=0.0, kw_only=True)  #: how strongly weights are pulled towards zero
    clip: float | None = field(default=None, kw_only=True)  #: largest gradient norm; None: no clipping
    mu: float = field(default=0.0, kw_only=True)  #: FedProx's proximal weight; 0 is FedAvg
    scaffold: bool = field(default=False, init=False, repr=False)  #: SCAFFOLD's control variates (LocalSGD alone)
    schedule: Schedule = field(init=False, repr=False, compare=False)

    #: False: ``weight_decay·w`` is added to the gradient. True: the weights shrink by ``1 − η·weight_decay`` (AdamW).
    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", as_schedule(self.lr, "lr"))
        if self.batch_size == "full":
            object.__setattr__(self, "batch_size", None)
        if (self.epochs is None) == (self.steps is None):
            raise FedalignError(f"give epochs or steps, one of the two, not epochs={self.epochs}, steps={self.steps}")
        for name in ("epochs", "steps", "batch_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1):
                raise FedalignError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.fresh and (self.steps is None or self.batch is None):
            raise FedalignError("fresh draws every batch anew, so it goes with steps and a batch_size")
        self._check_not_negative("weight_decay", "mu")
        if self.clip is not None and not (isinstance(self.clip, numbers.Real) and float(self.clip) > 0):
            raise FedalignError(f"clip must be positive (or None for no clipping), not {self.clip}")

    def _check_not_negative(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
                raise FedalignError(f"{name} must be at least 0, not {value}")

    @abc.abstractmethod
    def update(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], state: State, rate: Rate
    ) -> None:
        """Do one step of all stacked clients: change ``parameters`` and ``state`` in place.

        ``gradients`` belong to the parameters and may be overwritten. ``rate`` is a float, or a vector with one rate
        for each client; at rate 0 a client must stay where it is. What changes from step to step lives in tensors of
        ``state``, a step count too (:class:`LocalAdam` has one): a CUDA graph replays the same calls every step.
        """

    def state(self, parameters: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """Make what the rule remembers, as it is at the start of every round: stacked tensors, by name.

        Like the parameters, these tensors have the clients as their first dimension.
        """
        return {}

    def reference(self, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimiser of the reference engine for one client's parameters.

        The default applies :meth:`update` to a stack of one. A subclass whose rule PyTorch has gives PyTorch's own,
        so that the engines are compared with independent code.
        """
        from fedalign.training.stack_of_one import StackOfOne

        return StackOfOne(self, parameters)

    @property
    def batch(self) -> int | None:
        """The size of a batch as a number; None for the full batch."""
        return None if self.batch_size is None or self.batch_size == "full" else int(self.batch_size)

    @property
    def is_plain(self) -> bool:
        """Whether a step is ``w ← w − η·∇loss`` and nothing else, which engines may fuse with the gradient."""
        return False

    def check(self, rounds: int) -> None:
        """Refuse a learning rate that is not a positive number in some round."""
        values(self.schedule, rounds, "lr", positive=True)

    def batches_per_epoch(self, samples: int) -> int:
        """Count the batches of one pass, the last partial one included."""
        return 1 if self.batch is None else math.ceil(samples / self.batch)

    def width_for(self, samples: int) -> int:
        """Give the width that a client's batches are padded to when clients are stacked.

        It depends on the client alone, so that the order of its sums, to the last bit, doesn't depend on its
        neighbours; and it takes few values, so that clients of unlike sizes can be stacked.

        >>> from fedalign import LocalSGD
        >>> [LocalSGD(lr=0.1, epochs=1, batch_size=50).width_for(n) for n in (3, 30, 50, 1000)]
        [8, 32, 50, 50]
        """
        grain = max(8, 1 << max(0, samples.bit_length() - 4))
        rounded = -(-samples // grain) * grain
        return rounded if self.batch is None else min(self.batch, rounded)

    def steps_for(self, samples: int) -> int:
        """Count a round's local steps of a client with so many training samples."""
        return self.steps if self.steps is not None else (self.epochs or 0) * self.batches_per_epoch(samples)

    def samples_for(self, samples: int) -> int:
        """Count the samples that a client with so many trains on in a round, each as often as it comes.

        >>> from fedalign import LocalSGD
        >>> LocalSGD(lr=0.1, epochs=5).samples_for(120), LocalSGD(lr=0.1, steps=4, batch_size=50).samples_for(120)
        (600, 170)
        """
        if self.epochs is not None:
            return self.epochs * samples
        if self.fresh:
            return (self.steps or 0) * min(self.batch or samples, samples)
        passes, rest = divmod(self.steps or 0, self.batches_per_epoch(samples))
        return passes * samples + min(rest * (self.batch or samples), samples)

    def rate(self, round: int, rounds: int, step: int, steps: int) -> float:
        """Give η for one local step (``step`` of ``steps`` in this round)."""
        t = round * steps + step if self.schedule.counts == "steps" else round
        return self.schedule.at(t, rounds)

    def total_rate(self, round: int, rounds: int, samples: int) -> float:
        """Give the sum of η over a round's local steps of a client with so many training samples.

        >>> from fedalign import LocalSGD
        >>> LocalSGD(lr=0.5, steps=4).total_rate(0, 1, samples=120)
        2.0
        """
        steps = self.steps_for(samples)
        return math.fsum(self.rate(round, rounds, step, steps) for step in range(steps))


def per_client(rate: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shape a vector with one number per client so that it multiplies a stacked tensor.

    >>> (per_client(torch.tensor([1.0, 2.0]), torch.ones(2, 3)) * torch.ones(2, 3)).tolist()
    [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    """
    return rate.view(-1, *(1,) * (like.dim() - 1))


def descend(parameter: torch.Tensor, direction: torch.Tensor, rate: Rate) -> None:
    """Move a stacked parameter in place: ``w ← w − rate·direction``, with one rate or one per client.

    >>> stack = torch.ones(2, 1)
    >>> descend(stack, torch.ones(2, 1), torch.tensor([0.5, 0.25]))
    >>> stack.tolist()
    [[0.5], [0.75]]
    """
    if isinstance(rate, float):
        parameter.sub_(direction, alpha=rate)
    else:
        parameter.addcmul_(direction, per_client(rate, direction), value=-1)


def decay(parameter: torch.Tensor, weight_decay: float, rate: Rate) -> None:
    """Shrink a stacked parameter in place by ``1 − rate·weight_decay``: weight decay apart from the gradient.

    >>> stack = torch.ones(1, 2)
    >>> decay(stack, 0.5, 0.1)
    >>> stack.tolist()
    [[0.949999988079071, 0.949999988079071]]
    """
    if isinstance(rate, float):
        parameter.mul_(1 - rate * weight_decay)
    else:
        parameter.mul_(1 - per_client(rate, parameter) * weight_decay)
