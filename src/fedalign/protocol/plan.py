"""The plan of a run, and the conversion of a warm-up to rounds."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedalign.errors import FedalignError
from fedalign.rules.rule import Rule, Split
from fedalign.training.server import ServerOptimizer

if TYPE_CHECKING:
    from fedalign.ledger.ledger import Ledger


@dataclass(frozen=True)
class Plan:
    """The settings that a run's decisions depend on."""

    rule: Rule
    rounds: int
    warmup: int = 0  #: number of first rounds in which only priority clients take part
    match_on: Split = "heldout"  #: the data that F and F_k are measured on
    evaluate_on: Split = "heldout"  #: the data that the priority clients choose candidates by
    has_test: bool = True
    measure_training: bool = True  #: also measure every aggregate on the priority clients' training data
    free_alone: bool = True  #: where clients train alone, free clients do so too
    server: ServerOptimizer | None = None  #: None: take the aggregate as it is, as FedAvg does
    work: Sequence[int] = ()  #: the samples, passes included, that each client trains on in a round; for the record
    ledger: Ledger | None = None  #: how clients are valued; None: not at all
    seed: int = 0  #: of the orders that the ledger draws

    @property
    def scores_heldout(self) -> bool:
        """Whether every aggregate is also measured on held-out data, because there is no test data."""
        return not self.has_test and self.evaluate_on == "heldout"

    def invites_free(self, round: int) -> bool:
        """Say whether free clients are invited in a round: not during warm-up, and only if the rule wants them."""
        return self.rule.invites_free and round >= self.warmup

    def epsilon_at(self, round: int) -> float | None:
        """Return the round's ε as a plain number, or None if the rule has none."""
        epsilon = self.rule.epsilon_at(round, self.rounds)
        return None if epsilon is None else float(epsilon)


def warmup_rounds(warmup: float, rounds: int) -> int:
    """Convert a warm-up, given as a fraction of the rounds (a float up to 1.0) or as a number of rounds, to rounds.

    >>> warmup_rounds(0.1, 200), warmup_rounds(5, 200)
    (20, 5)
    """
    number = isinstance(warmup, numbers.Real) and not isinstance(warmup, bool)
    if not number or not 0 <= warmup < math.inf:
        raise FedalignError(f"warmup must be a fraction of the rounds or a number of rounds, not {warmup!r}")
    if not isinstance(warmup, numbers.Integral) and warmup <= 1:
        return math.floor(warmup * rounds + 0.5)
    if warmup != int(warmup) or warmup > rounds:
        raise FedalignError(f"warmup must be a fraction up to 1.0 or 0 to {rounds} whole rounds, not {warmup}")
    return int(warmup)
