"""What a client does with the model it received: E local epochs of SGD, plain or proximal.

``mu`` adds the term ``μ/2·‖w_k − w‖²`` of FedProx (Li et al., 2020, arXiv:1812.06127) to the local objective.
``scaffold`` corrects every step by control variates (Karimireddy et al., 2020, arXiv:1910.06378, option II): ``c −
c_k`` is added to the gradient; afterwards ``c_k ← c_k − c + (w − w_k)/Ση``, and the server adds ``a·Σ share_k·Δc_k`` to
``c``, with the aggregate's shares and ``a`` the part of the priority clients' weight that took part.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field

from fedalign.errors import FedalignError
from fedalign.training.schedules import Schedulable, Schedule, as_schedule, values


@dataclass(frozen=True)
class LocalSGD:
    """Local work: ``epochs`` passes over the client's data, or ``steps`` batches of it.

    Every step computes ``g = ∇loss + mu·(w_k − w)``, clips it to norm ``clip``, adds ``weight_decay·w_k``, and moves
    with heavy-ball momentum as ``torch.optim.SGD`` does. Momentum starts at zero every round.

    >>> LocalSGD(lr=0.1, epochs=5, batch_size=50).steps_for(120)
    15
    >>> LocalSGD(lr=0.1, steps=4).steps_for(120)
    4
    """

    lr: Schedulable  #: learning rate: a number, a schedule, or a callable of the round
    epochs: int | None = None  #: passes over the data in a round; exactly one of epochs and steps
    steps: int | None = None  #: batches in a round, continuing into further passes where needed
    batch_size: int | None = 50  #: None: full batch
    fresh: bool = False  #: draw every batch of `steps` anew, as the theory has it, not in passes over the data
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None  #: largest gradient norm; None: no clipping
    mu: float = 0.0  #: FedProx's proximal weight; 0 is FedAvg
    scaffold: bool = False  #: SCAFFOLD's control variates
    schedule: Schedule = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", as_schedule(self.lr, "lr"))
        if (self.epochs is None) == (self.steps is None):
            raise FedalignError(f"give epochs or steps, one of the two, not epochs={self.epochs}, steps={self.steps}")
        for name in ("epochs", "steps", "batch_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1):
                raise FedalignError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.fresh and (self.steps is None or self.batch_size is None):
            raise FedalignError("fresh draws every batch anew, so it goes with steps and a batch_size")
        for name in ("momentum", "weight_decay", "mu"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
                raise FedalignError(f"{name} must be at least 0, not {value}")
        if self.scaffold and (self.momentum or self.mu or self.clip is not None):
            raise FedalignError("scaffold corrects plain SGD steps: leave momentum, mu and clip out")
        if self.clip is not None and not (isinstance(self.clip, numbers.Real) and float(self.clip) > 0):
            raise FedalignError(f"clip must be positive (or None for no clipping), not {self.clip}")

    def check(self, rounds: int) -> None:
        """Refuse a learning rate that is not a positive number in some round."""
        values(self.schedule, rounds, "lr", positive=True)

    def batches_per_epoch(self, samples: int) -> int:
        """Count the batches of one pass, the last partial one included."""
        return 1 if self.batch_size is None else math.ceil(samples / self.batch_size)

    def width_for(self, samples: int) -> int:
        """Give the width that a client's batches are padded to when clients are stacked.

        It depends on the client alone, so that the order of its sums, to the last bit, doesn't depend on its
        neighbours; and it takes few values, so that clients of unlike sizes can be stacked.

        >>> [LocalSGD(lr=0.1, epochs=1, batch_size=50).width_for(n) for n in (3, 30, 50, 1000)]
        [8, 32, 50, 50]
        """
        grain = max(8, 1 << max(0, samples.bit_length() - 4))
        rounded = -(-samples // grain) * grain
        return rounded if self.batch_size is None else min(self.batch_size, rounded)

    def steps_for(self, samples: int) -> int:
        """Count a round's local steps of a client with so many training samples."""
        return self.steps if self.steps is not None else (self.epochs or 0) * self.batches_per_epoch(samples)

    def samples_for(self, samples: int) -> int:
        """Count the samples that a client with so many trains on in a round, each as often as it comes.

        >>> LocalSGD(lr=0.1, epochs=5).samples_for(120), LocalSGD(lr=0.1, steps=4, batch_size=50).samples_for(120)
        (600, 170)
        """
        if self.epochs is not None:
            return self.epochs * samples
        if self.fresh:
            return (self.steps or 0) * min(self.batch_size or samples, samples)
        passes, rest = divmod(self.steps or 0, self.batches_per_epoch(samples))
        return passes * samples + min(rest * (self.batch_size or samples), samples)

    def rate(self, round: int, rounds: int, step: int, steps: int) -> float:
        """Give η for one local step (``step`` of ``steps`` in this round)."""
        t = round * steps + step if self.schedule.counts == "steps" else round
        return self.schedule.at(t, rounds)
