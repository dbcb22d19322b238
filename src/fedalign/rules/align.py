"""Who is let in: the free client's own decision (``offers``) and the server's (``admits``).

``Align`` is FedALIGN's rule (Ravi and Shomorony, "Utilizing Free Clients in Federated Learning for Focused Model
Enhancement", 2023): a free client offers if the model serves it, ``F_k(w) ≤ F(w) + ε``, and is admitted if the
model serves it about as well as it serves the priority clients, ``|F_k(w) − F(w)| ≤ ε``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fedalign.errors import FedalignError
from fedalign.rules.rule import Broadcast, Candidate, MatchOn, Measure, Rule, Similarity
from fedalign.training.schedules import Constant, Schedulable, Schedule, as_schedule, values

# Accuracies are fractions of a few samples, so exact ties with the band happen (0.8 − 0.7 against ε = 0.1) and
# binary rounding must not decide them.
_ACCURACY_SLACK = 1e-9


class PriorityOnly(Rule):
    """FedAvg on the priority clients: free clients aren't invited."""

    invites_free = False

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Never."""
        return False

    def admits(self, own: Measure, broadcast: Broadcast) -> bool:
        """Never."""
        return False


class Everyone(Rule):
    """FedAvg on everybody, weights in proportion to sample counts (after the run's warm-up, if it has one)."""

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Always."""
        return True

    def admits(self, own: Measure, broadcast: Broadcast) -> bool:
        """Always."""
        return True

    def why(self, own: Measure, broadcast: Broadcast, admitted: bool) -> str:
        """Say so."""
        return "everyone is admitted"


@dataclass(frozen=True)
class Align(Rule):
    """FedALIGN. ``epsilon`` is a number, a schedule or a callable of the round; ``on`` is loss or accuracy.

    >>> rule, F = Align(epsilon=0.2), Broadcast(round=0, loss=1.0, epsilon=0.2)
    >>> [rule.offers(Measure(loss, None, 1), F) for loss in (0.1, 0.9, 1.1, 1.9)]
    [True, True, True, False]
    >>> [rule.admits(Measure(loss, None, 1), F) for loss in (0.1, 0.9, 1.1, 1.9)]
    [False, True, True, False]
    """

    epsilon: Schedulable = 0.2
    on: Literal["loss", "accuracy"] = "loss"
    match_on: MatchOn | None = None
    schedule: Schedule = field(init=False, repr=False, compare=False)
    needs_accuracy: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", as_schedule(self.epsilon, "epsilon"))
        if self.on not in ("loss", "accuracy"):
            raise FedalignError(f"Align matches on 'loss' or 'accuracy', not on {self.on!r}")
        if self.match_on not in (None, "heldout", "train"):
            raise FedalignError(f"match_on must be 'heldout' or 'train', not {self.match_on!r}")
        object.__setattr__(self, "needs_accuracy", self.on == "accuracy")
        if isinstance(self.schedule, Constant):
            self.check(1)

    def check(self, rounds: int) -> None:
        """Refuse an ε that is negative or NaN in some round."""
        values(self.schedule, rounds, "epsilon")

    def epsilon_at(self, round: int, rounds: int) -> float:
        """Evaluate the schedule."""
        return float(self.schedule.at(round, rounds))

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Offer if the model serves this client: ``F_k ≤ F + ε``, or ``acc_k ≥ acc − ε``."""
        epsilon = _epsilon(broadcast)
        if self.on == "loss":
            return own.loss <= broadcast.loss + epsilon
        mine, theirs = _accuracies(own, broadcast)
        return mine >= theirs - epsilon - _ACCURACY_SLACK

    def admits(self, own: Measure, broadcast: Broadcast) -> bool:
        """Admit if the client is aligned: ``|F_k − F| ≤ ε``, or the same of accuracies."""
        slack = 0.0 if self.on == "loss" else _ACCURACY_SLACK
        return self.gap(own, broadcast) <= _epsilon(broadcast) + slack

    def gap(self, own: Measure, broadcast: Broadcast) -> float:
        """Give ``|F_k − F|``, or the same of accuracies: the smallest ε that admits a client."""
        if self.on == "loss":
            return abs(own.loss - broadcast.loss)
        mine, theirs = _accuracies(own, broadcast)
        return abs(mine - theirs)

    def why(self, own: Measure, broadcast: Broadcast, admitted: bool) -> str:
        """Spell the inequality out."""
        if self.on == "loss":
            name, mine, theirs = "loss", own.loss, broadcast.loss
        else:
            name = "accuracy"
            mine, theirs = _accuracies(own, broadcast)
        sign = "within" if admitted else "not within"
        return f"{name} {mine:.4g}, {sign} {_epsilon(broadcast):.4g} of {theirs:.4g}"


@dataclass(frozen=True)
class AutoAlign(Rule):
    """AutoALIGN: FedALIGN whose ε the priority clients choose every round.

    Free clients offer with the widest ε. The server averages the sets of clients that FedALIGN would admit with one ε
    after another: those of a ``ladder``, or, without one, those that admit the best aligned 1, 2, 3, 4, 6, 8, 12, …
    clients. Priority clients measure these candidates (equal sets once) on held-out data and are served the one with
    the lowest weighted loss, the smaller set on a tie. The empty set is always among them, so no round's choice is
    worse on that data than FedAvg on the priority clients. Only a ladder of one ε is FedALIGN with it.

    The next round starts from another model, the base: it has the updates of all free clients that don't clearly point
    against the priority clients' mean update (their cosine with it is at least ``cosine``). What is best for a round is
    seldom best to go on from. With a ladder, or without a ``cosine``, the next round starts from the choice.

    ``fallback`` keeps FedAvg on the priority clients beside, which they are served where the choices fall behind it
    (see ``fedalign.protocol.fallback``).

    >>> rule, F = AutoAlign(), Broadcast(round=0, loss=1.0, epsilon=math.inf)
    >>> own = {4: Measure(1.1, None, 1), 7: Measure(1.9, None, 1), 9: Measure(0.95, None, 1)}
    >>> [candidate.clients for candidate in rule.candidates(own, F)]
    [(), (9,), (4, 9), (4, 7, 9)]
    >>> [candidate.clients for candidate in AutoAlign(ladder=(0, 0.2, 1)).candidates(own, F)]
    [(), (4, 9), (4, 7, 9)]
    """

    ladder: tuple[float, ...] | None = None
    on: Literal["loss", "accuracy"] = "loss"
    match_on: MatchOn | None = None
    fallback: bool = True
    cosine: float | None = -0.1
    needs_accuracy: bool = field(init=False, repr=False, compare=False)
    needs_updates: bool = field(init=False, repr=False, compare=False)
    _align: Align = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        widest = math.inf
        if self.ladder is not None:
            try:
                steps = sorted({float(epsilon) for epsilon in self.ladder})
            except (TypeError, ValueError):
                steps = []
            if not steps or any(math.isnan(epsilon) or epsilon < 0 for epsilon in steps):
                raise FedalignError(f"AutoAlign's ladder must hold at least one ε, none negative, not {self.ladder!r}")
            object.__setattr__(self, "ladder", tuple(steps))
            widest = steps[-1]
        if self.cosine is not None:
            number = isinstance(self.cosine, numbers.Real) and not isinstance(self.cosine, bool)
            if not number or not -1 <= self.cosine <= 1:
                raise FedalignError(f"AutoAlign's cosine must be from -1 to 1, not {self.cosine!r}")
        object.__setattr__(self, "needs_updates", self.has_base or type(self).needs_updates)
        object.__setattr__(self, "_align", Align(widest, self.on, self.match_on))
        object.__setattr__(self, "needs_accuracy", self.on == "accuracy")

    @property
    def is_fedalign(self) -> bool:
        """Whether there is one ε, and so no choice."""
        return self.ladder is not None and len(self.ladder) == 1

    @property
    def has_base(self) -> bool:
        """Whether the next round starts from another model than the chosen one."""
        return self.ladder is None and self.cosine is not None

    def epsilon_at(self, round: int, rounds: int) -> float:
        """Give the widest ε: with it free clients decide whether to offer."""
        return self._align.epsilon_at(round, rounds)

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Offer as with FedALIGN."""
        return self._align.offers(own, broadcast)

    def admits(self, own: Measure, broadcast: Broadcast) -> bool:
        """Admit as FedALIGN does, with the broadcast's ε."""
        return self._align.admits(own, broadcast)

    def why(self, own: Measure, broadcast: Broadcast, admitted: bool) -> str:
        """Spell the inequality out for the ε that was chosen."""
        return self._align.why(own, broadcast, admitted)

    def candidates(self, own: Mapping[int, Measure], broadcast: Broadcast) -> list[Candidate]:
        """Give one candidate for each distinct set, with the smallest ε that gives it."""
        # Of several, 0 is for nobody, whoever has a gap of 0.
        found: dict[tuple[int, ...], Candidate] = {} if self.is_fedalign else {(): Candidate(0.0, ())}
        for epsilon in self._cuts(own, broadcast) if self.ladder is None else self.ladder:
            if epsilon == 0 and self.ladder is not None and not self.is_fedalign:
                continue
            narrowed = replace(broadcast, epsilon=epsilon)
            clients = tuple(k for k, mine in own.items() if self.admits(mine, narrowed))
            found.setdefault(clients, Candidate(epsilon, clients))
        return sorted(found.values(), key=lambda candidate: len(candidate.clients))

    def base(
        self, own: Mapping[int, Measure], similar: Mapping[int, Similarity], broadcast: Broadcast
    ) -> Mapping[int, str] | None:
        """Take those whose updates don't point against the priority clients' mean; one of length 0 is of no use."""
        if not self.has_base:
            return None
        assert self.cosine is not None
        cosines = {k: similar[k].cosine for k in own if similar[k].length > 0}
        return {
            k: f"in the base: cosine {c:.3g}, at least {self.cosine:g}" for k, c in cosines.items() if c >= self.cosine
        }

    def _cuts(self, own: Mapping[int, Measure], broadcast: Broadcast) -> list[float]:
        """Give the ε that admit the best aligned clients, ever more of them."""
        gaps = sorted(gap for mine in own.values() if not math.isnan(gap := self._align.gap(mine, broadcast)))
        return [gaps[size - 1] for size in _sizes(len(gaps))]


def _sizes(most: int) -> list[int]:
    """List set sizes in steps of a third or so: 1, 2, 3, 4, 6, 8, 12, 16, …, and all.

    >>> _sizes(20)
    [1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    powers = (2**i for i in range(most.bit_length()))
    steps = sorted({size for power in powers for size in (power, power * 3 // 2)} | {most})
    return [size for size in steps if 0 < size <= most]


def _epsilon(broadcast: Broadcast) -> float:
    if broadcast.epsilon is None:
        raise FedalignError(f"Align needs an epsilon in the broadcast of round {broadcast.round}")
    return broadcast.epsilon


def _accuracies(own: Measure, broadcast: Broadcast) -> tuple[float, float]:
    if own.accuracy is None or broadcast.accuracy is None:
        raise FedalignError("matching on accuracy needs a task with classes; this one has none: use on='loss'")
    return own.accuracy, broadcast.accuracy
