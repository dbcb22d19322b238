"""FedALIGN, verified: free clients are admitted by what the priority clients measure, not by what they report.

The rounds are in :mod:`fedalign.protocol.verified`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from fedalign.errors import FedalignError
from fedalign.rules.baselines import Everyone
from fedalign.rules.rule import Broadcast, MatchOn, Measure, Offer, Rule, Selection


@dataclass(frozen=True)
class Verified(Rule):
    """Let another rule propose free clients, and the priority clients verify what their updates do.

    ``rule`` proposes; by default everybody may join. Updates of free clients are shortened to ``length`` times the
    median length of the priority clients' updates, and every coordinate is kept ``within`` so many standard deviations
    of the priority clients' mean update. A free client weighs at most ``each`` times as much as the average priority
    client, whatever sample count it claims, and all of them together at most ``total`` times as much as the priority
    clients. Copies and clients whose updates are too much alike take no part: less the mean update of all, theirs
    resemble one, two or many others' far more than is usual. ``alike`` says how far: in distances from the median
    client's resemblance to a quartile's. The priority clients then measure, on held-out data, their own aggregate with
    each free client (``probes`` clients a round, by turns) and without each of their own, and the aggregates of the
    best 1, 2, 3, 4, 6, 8, … free clients. A client is as good as this round's change of the loss, or its average over
    the rounds, whichever is worse. The best aggregate is served.

    Losses of models are compared at the temperature that is best for each (``calibration.py``), so that a model is not
    preferred for being less confident. ``calibrated=False`` compares plain losses.

    The next round trains on from another aggregate. It may hold a client only if

    - neither of these two changes is an outlier among all clients', or larger than when the priority client that
      matters most is missing;
    - the cosine of its update with the priority clients' mean update is at least ``cosine``;
    - it is in the better part of the clients. This part, the *breadth*, is all of them at first. It is halved when the
      served aggregate has a higher loss than the priority-only model, or when free clients give no *head start*; it
      grows again in good rounds.

    The largest aggregate of such clients is taken whose loss is at most ``1 + tolerance`` times that of the received
    model or of the served one, whichever is higher.

    FedAvg on the priority clients, the *priority-only model*, is trained as well. It is served in every round in which
    the choice is worse; if the choice's loss is far higher, training goes on from it too. So it does if free clients
    give no head start: on average over the rounds, the priority clients' own aggregate must have a loss at least 1 %
    lower than this model's. With ``promise`` the record says by how much the served model may be worse
    (docs/research/promise.md), if the priority clients have held-out data.

    >>> rule = Verified()
    >>> rule.select({3: Offer(Measure(9.0, None, 5))}, Broadcast(round=0, loss=1.0)).clients
    (3,)
    >>> Verified(length=0)
    Traceback (most recent call last):
    fedalign.errors.FedalignError: Verified's length must be a number above 0, not 0
    """

    algorithm: ClassVar[str] = "verified"
    evaluates = True
    rule: Rule = field(default_factory=Everyone)
    length: float = 2.0
    within: float = 8.0
    each: float = 1.0
    total: float = 10.0
    tolerance: float = 1.0
    cosine: float = -0.15
    alike: float = 4.0
    probes: int = 64
    calibrated: bool = True
    promise: bool = True
    match_on: MatchOn | None = None
    needs_updates: bool = field(default=True, init=False, repr=False, compare=False)
    needs_accuracy: bool = field(init=False, repr=False, compare=False)
    invites_free: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule) or isinstance(self.rule, Verified):
            raise FedalignError(f"Verified verifies another rule, not {self.rule!r}")
        for name in ("length", "within", "each", "total", "alike"):
            if not _is_number(getattr(self, name)) or not getattr(self, name) > 0:
                raise FedalignError(f"Verified's {name} must be a number above 0, not {getattr(self, name)!r}")
        if not _is_number(self.tolerance) or not 0 <= self.tolerance < math.inf:
            raise FedalignError(f"Verified's tolerance must be a finite number, 0 or more, not {self.tolerance!r}")
        if not _is_number(self.cosine) or not -1 <= self.cosine <= 1:
            raise FedalignError(f"Verified's cosine must be from -1 to 1, not {self.cosine!r}")
        if isinstance(self.probes, bool) or not isinstance(self.probes, numbers.Integral) or self.probes < 1:
            raise FedalignError(f"Verified's probes must be a whole number of at least 1, not {self.probes!r}")
        object.__setattr__(self, "match_on", self.match_on or self.rule.match_on)
        object.__setattr__(self, "needs_accuracy", self.rule.needs_accuracy)
        object.__setattr__(self, "invites_free", self.rule.invites_free)

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Offer if the inner rule would."""
        return self.rule.offers(own, broadcast)

    def select(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> Selection:
        """Propose what the inner rule would admit."""
        return self.rule.select(offers, broadcast)

    def epsilon_at(self, round: int, rounds: int) -> float | None:
        """Return the ε of the inner rule."""
        return self.rule.epsilon_at(round, rounds)

    def check(self, rounds: int) -> None:
        """Check the settings of the inner rule."""
        self.rule.check(rounds)

    def why(self, own: Measure, broadcast: Broadcast, admitted: bool) -> str:
        """Return the reason that the inner rule gives; measured clients have another one."""
        return self.rule.why(own, broadcast, admitted)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
