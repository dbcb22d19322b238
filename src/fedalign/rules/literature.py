"""Rules from the literature to compare FedALIGN with; each names its paper. Priority clients always take part.

``GradientAlign`` and ``TrustWeighted`` judge updates, so every invited client trains, and a simulation holds a round's
updates in memory. ``PowerOfChoice`` and ``LossWeighted`` need the clients' losses alone.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedalign.errors import FedalignError
from fedalign.rules.align import Everyone
from fedalign.rules.rule import Broadcast, Candidate, MatchOn, Measure, Rule, Similarity


class _JudgesUpdates(Rule):
    """A rule for which a free client always offers: the server decides when it has seen the update."""

    needs_updates = True

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Always."""
        return True

    def admits(self, own: Measure, broadcast: Broadcast) -> bool:
        """Say nothing of a loss: the update decides."""
        return True


@dataclass
class GradientAlign(_JudgesUpdates):
    """Admit a free client whose update points where the priority clients' mean update does: cosine ≥ ``threshold``.

    After Wu and Wang, "Node Selection Toward Faster Convergence for Federated Learning on Non-IID Data" (2022,
    arXiv:2105.07066), which keeps nodes whose gradient has a positive inner product with the global one; here it is the
    priority clients' mean, and the threshold may be another. An update of length 0 points nowhere and stays out.

    >>> rule, F = GradientAlign(0.1), Broadcast(round=0, loss=1.0)
    >>> own = {2: Measure(1.0, None, 1), 3: Measure(1.0, None, 1)}
    >>> rule.compare(own, {2: Similarity(0.3, 1.0), 3: Similarity(-0.2, 1.0)}, F)[0].clients
    (2,)
    """

    threshold: float = 0.0
    match_on: MatchOn | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.threshold, numbers.Real) and -1 <= self.threshold <= 1):
            raise FedalignError(f"threshold must be a cosine, from -1 to 1, not {self.threshold}")

    def compare(
        self, own: Mapping[int, Measure], similar: Mapping[int, Similarity], broadcast: Broadcast
    ) -> list[Candidate]:
        """Admit by cosine."""
        admitted = tuple(k for k in own if similar[k].cosine >= self.threshold and similar[k].length > 0)
        sides = {k: "at least" if k in admitted else "below" for k in own}
        reasons = {k: f"cosine {similar[k].cosine:.3g}, {sides[k]} {self.threshold:g}" for k in own}
        return [Candidate(None, admitted, reasons=reasons)]


@dataclass
class TrustWeighted(_JudgesUpdates):
    """Weigh free clients' updates by trust ``max(0, cosine)``, each scaled to the length of the root's update.

    FLTrust (Cao, Fang, Liu and Gong, 2021, arXiv:2012.13995), with the priority clients' mean update as the root of
    trust. The root itself has trust 1, so that with nobody trusted the model is FedAvg's on the priority clients:
    ``w⁺ = w + (Δ_P + Σ_free trust_k·Δ_k·‖Δ_P‖/‖Δ_k‖) / (1 + Σ_free trust_k)``.
    """

    match_on: MatchOn | None = None

    def compare(
        self, own: Mapping[int, Measure], similar: Mapping[int, Similarity], broadcast: Broadcast
    ) -> list[Candidate]:
        """Trust by cosine."""
        trust = {k: similar[k].cosine for k in own if similar[k].cosine > 0 and similar[k].length > 0}
        reasons = {k: f"cosine {similar[k].cosine:.3g}: trust {trust.get(k, 0.0):.3g}" for k in own}
        step = {k: 1 / similar[k].length for k in trust}
        return [Candidate(None, tuple(trust), step=step, reasons=reasons, weight=trust)]


@dataclass
class PowerOfChoice(Rule):
    """Admit the ``clients`` free clients with the highest loss: those that the model serves worst.

    Cho, Wang and Joshi, "Client Selection in Federated Learning: Convergence Analysis and Power-of-Choice Selection
    Strategies" (2020, arXiv:2010.01243). Its candidate set, drawn at random, is here who shows up (participation);
    losses are those that rules see (held-out, where the paper has the local objective), and who is chosen weighs
    ``p_k``, beside the priority clients, where the paper's ``m`` clients weigh the same.

    >>> own = {k: Measure(loss, None, 1) for k, loss in ((2, 0.5), (3, 2.0), (4, 1.0))}
    >>> PowerOfChoice(clients=2).candidates(own, Broadcast(round=0, loss=1.0))[0].clients
    (3, 4)
    """

    clients: int = 5
    match_on: MatchOn | None = None

    def __post_init__(self) -> None:
        if isinstance(self.clients, bool) or not isinstance(self.clients, numbers.Integral) or self.clients < 0:
            raise FedalignError(f"clients must be a whole number of at least 0, not {self.clients!r}")

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Always."""
        return True

    def admits(self, own: Measure, broadcast: Broadcast) -> bool:
        """Say nothing of a client alone: it is a contest."""
        return True

    def candidates(self, own: Mapping[int, Measure], broadcast: Broadcast) -> list[Candidate]:
        """Take the highest losses (of equal ones the first clients)."""
        usable = [k for k in own if math.isfinite(own[k].loss)]
        worst = sorted(usable, key=lambda k: (-own[k].loss, k))[: self.clients]
        chosen = tuple(sorted(worst))
        reasons = {
            k: f"loss {mine.loss:.4g}, {'among' if k in chosen else 'not among'} the {self.clients} highest"
            for k, mine in own.items()
        }
        return [Candidate(None, chosen, reasons=reasons)]


@dataclass
class LossWeighted(Rule):
    """Multiply each admitted free client's weight by ``(F_k/F)^power``: what is served worse counts more.

    After q-FedAvg (Li, Sanjabi, Beirami and Smith, "Fair Resource Allocation in Federated Learning", 2020,
    arXiv:1905.10497), which weighs clients by a power of their loss; its way to choose the length of a step is left
    out. ``rule`` says who is admitted: everybody, as in FedAvg, or FedALIGN's choice with ``Align(0.2)``; a rule that
    looks at updates, or keeps a way back, can't be weighed so. Who has no finite loss stays out.
    """

    power: float = 1.0
    rule: Rule = field(default_factory=Everyone)
    match_on: MatchOn | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.power, numbers.Real) and math.isfinite(self.power)):
            raise FedalignError(f"power must be a number, not {self.power!r}")
        if self.rule.needs_updates or self.rule.fallback:
            raise FedalignError(f"LossWeighted weighs by losses alone, so its rule can't be {self.rule!r}")
        self.match_on = self.match_on or self.rule.match_on
        self.needs_accuracy = self.rule.needs_accuracy
        self.invites_free = self.rule.invites_free

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Offer as the inner rule says."""
        return self.rule.offers(own, broadcast)

    def admits(self, own: Measure, broadcast: Broadcast) -> bool:
        """Admit as the inner rule says."""
        return self.rule.admits(own, broadcast)

    def epsilon_at(self, round: int, rounds: int) -> float | None:
        """Give the inner rule's ε."""
        return self.rule.epsilon_at(round, rounds)

    def check(self, rounds: int) -> None:
        """Check the inner rule."""
        self.rule.check(rounds)

    def why(self, own: Measure, broadcast: Broadcast, admitted: bool) -> str:
        """Say what the inner rule says."""
        return self.rule.why(own, broadcast, admitted)

    def choose(
        self, candidates: Sequence[Candidate], measures: Sequence[Mapping[int, Measure]], p: Mapping[int, float]
    ) -> int:
        """Choose as the inner rule does."""
        return self.rule.choose(candidates, measures, p)

    def candidates(self, own: Mapping[int, Measure], broadcast: Broadcast) -> list[Candidate]:
        """Weigh the inner rule's candidates."""
        usable = {k: mine for k, mine in own.items() if math.isfinite(mine.loss)}

        def factor(k: int) -> float:
            ratio = usable[k].loss / broadcast.loss if broadcast.loss > 0 else 1.0
            # As powers of e, and never so large that a sum of them overflows.
            return math.exp(min(max(self.power * math.log(max(ratio, 1e-12)), -300.0), 300.0))

        return [
            replace(one, scale={k: factor(k) * one.scale.get(k, 1.0) for k in one.clients})
            for one in self.rule.candidates(usable, broadcast)
        ]
