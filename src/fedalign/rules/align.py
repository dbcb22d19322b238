"""FedALIGN's rule, by Ravi and Shomorony (2023).

A free client offers if the model serves it, ``F_k(w) ≤ F(w) + ε``. The server admits it if the model serves it about
as well as it serves the priority clients, ``|F_k(w) − F(w)| ≤ ε``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedalign.errors import FedalignError
from fedalign.rules.rule import Broadcast, MatchOn, Measure, Offer, Rule, Selection
from fedalign.training.schedules import Constant, Schedulable, Schedule, as_schedule, values

# Accuracies are fractions of a few samples, so exact ties with the band happen (0.8 − 0.7 against ε = 0.1) and
# binary rounding must not decide them.
_ACCURACY_SLACK = 1e-9


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
        """Evaluate the schedule of ε in a round."""
        return float(self.schedule.at(round, rounds))

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Offer if the model serves this client: ``F_k ≤ F + ε``, or ``acc_k ≥ acc − ε``."""
        epsilon = _epsilon(broadcast)
        if self.on == "loss":
            return own.loss <= broadcast.loss + epsilon
        client_accuracy, priority_accuracy = _accuracies(own, broadcast)
        return client_accuracy >= priority_accuracy - epsilon - _ACCURACY_SLACK

    def admits(self, own: Measure, broadcast: Broadcast) -> bool:
        """Admit if the client is aligned: ``|F_k − F| ≤ ε``, or the same of accuracies."""
        slack = 0.0 if self.on == "loss" else _ACCURACY_SLACK
        return self.gap(own, broadcast) <= _epsilon(broadcast) + slack

    def select(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> Selection:
        """Admit the aligned clients among those that offer, with weight ``p_k``."""
        return Selection(tuple(k for k, offer in offers.items() if self.admits(offer.measure, broadcast)))

    def gap(self, own: Measure, broadcast: Broadcast) -> float:
        """Return ``|F_k − F|``, or the same of accuracies: the smallest ε that admits a client."""
        if self.on == "loss":
            return abs(own.loss - broadcast.loss)
        client_accuracy, priority_accuracy = _accuracies(own, broadcast)
        return abs(client_accuracy - priority_accuracy)

    def why(self, own: Measure, broadcast: Broadcast, admitted: bool) -> str:
        """Spell out the inequality that was tested on the server."""
        if self.on == "loss":
            name, of_client, of_priority = "loss", own.loss, broadcast.loss
        else:
            name = "accuracy"
            of_client, of_priority = _accuracies(own, broadcast)
        sign = "within" if admitted else "not within"
        return f"{name} {of_client:.4g}, {sign} {_epsilon(broadcast):.4g} of {of_priority:.4g}"


def _epsilon(broadcast: Broadcast) -> float:
    if broadcast.epsilon is None:
        raise FedalignError(f"Align needs an epsilon in the broadcast of round {broadcast.round}")
    return broadcast.epsilon


def _accuracies(own: Measure, broadcast: Broadcast) -> tuple[float, float]:
    if own.accuracy is None or broadcast.accuracy is None:
        raise FedalignError("matching on accuracy needs a task with classes; this one has none: use on='loss'")
    return own.accuracy, broadcast.accuracy
