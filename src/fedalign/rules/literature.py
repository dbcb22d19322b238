"""Rules from the literature to compare FedALIGN with; each names its paper. Priority clients always take part.

``GradientAlign`` and ``TrustWeighted`` compare updates, so every invited client trains, and a simulation holds
all updates of a round. ``PowerOfChoice`` and ``LossWeighted`` need the clients' losses alone. They believe what free
clients report, up to a bound: a liar whose loss is just below ``most`` times ``F`` gets all that the bound allows.
Where clients may lie, choose a rule by which the priority clients measure models themselves.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedalign.errors import FedalignError
from fedalign.rules.baselines import Everyone
from fedalign.rules.rule import Broadcast, MatchOn, Measure, Offer, Rule, Selection


class _ComparesUpdates(Rule):
    """A rule for which every free client offers: the server decides when it has seen the update."""

    needs_updates = True

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Return True: the update decides, not the loss."""
        return True


@dataclass
class GradientAlign(_ComparesUpdates):
    """Admit a free client whose update points where the priority clients' mean update does: cosine ≥ ``threshold``.

    After Wu and Wang, "Node Selection Toward Faster Convergence for Federated Learning on Non-IID Data" (2022,
    arXiv:2105.07066). The paper keeps nodes whose gradient has a positive inner product with the global one. Here the
    reference is the priority clients' mean, and the threshold can be set. An update of length 0 points nowhere
    and stays out.

    >>> rule, F = GradientAlign(0.1), Broadcast(round=0, loss=1.0)
    >>> from fedalign import Similarity
    >>> offers = {k: Offer(Measure(1.0, None, 1), Similarity(c, 1.0)) for k, c in ((2, 0.3), (3, -0.2))}
    >>> rule.select(offers, F).clients
    (2,)
    """

    threshold: float = 0.0
    match_on: MatchOn | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.threshold, numbers.Real) and -1 <= self.threshold <= 1):
            raise FedalignError(f"threshold must be a cosine, from -1 to 1, not {self.threshold}")

    def select(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> Selection:
        """Admit the clients whose cosine is at least the threshold."""
        admitted = tuple(k for k, offer in offers.items() if offer.cosine >= self.threshold and offer.length > 0)
        sides = {k: "at least" if k in admitted else "below" for k in offers}
        reasons = {k: f"cosine {offer.cosine:.3g}, {sides[k]} {self.threshold:g}" for k, offer in offers.items()}
        return Selection(admitted, reasons=reasons)


@dataclass
class TrustWeighted(_ComparesUpdates):
    """Weigh free clients' updates by trust ``max(0, cosine)``, each scaled to the length of the root's update.

    FLTrust (Cao, Fang, Liu and Gong, 2021, arXiv:2012.13995), with the priority clients' mean update as the root of
    trust. The root itself has trust 1, so that with nobody trusted the model is FedAvg's on the priority clients:
    ``w⁺ = w + (Δ_P + Σ_free trust_k·Δ_k·‖Δ_P‖/‖Δ_k‖) / (1 + Σ_free trust_k)``.
    """

    match_on: MatchOn | None = None

    def select(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> Selection:
        """Weigh each client by its cosine, where that is positive."""
        trust = {k: offer.cosine for k, offer in offers.items() if offer.cosine > 0 and offer.length > 0}
        reasons = {k: f"cosine {offer.cosine:.3g}: trust {trust.get(k, 0.0):.3g}" for k, offer in offers.items()}
        step = {k: 1 / offers[k].length for k in trust}
        return Selection(tuple(trust), weight=trust, step=step, reasons=reasons)


@dataclass
class PowerOfChoice(Rule):
    """Admit the ``clients`` free clients with the highest loss: those that the model serves worst.

    Cho, Wang and Joshi, "Client Selection in Federated Learning: Convergence Analysis and Power-of-Choice Selection
    Strategies" (2020, arXiv:2010.01243). Its candidate set, drawn at random, is here the reachable clients
    (participation). Losses are those that rules see: held-out, where the paper has the local objective. Beside the
    priority clients, chosen clients have weight ``p_k``, where the paper's ``m`` clients all have the same weight.
    A reported loss of more than ``most`` times ``F`` is not believed, and that client is not chosen; ``inf`` believes
    everything. A liar just below the bound is still chosen first.

    >>> offers = {k: Offer(Measure(loss, None, 1)) for k, loss in ((2, 0.5), (3, 2.0), (4, 1.0))}
    >>> PowerOfChoice(clients=2).select(offers, Broadcast(round=0, loss=1.0)).clients
    (3, 4)
    """

    clients: int = 5
    match_on: MatchOn | None = None
    most: float = 10.0

    def __post_init__(self) -> None:
        _check_most(self.most)
        if isinstance(self.clients, bool) or not isinstance(self.clients, numbers.Integral) or self.clients < 0:
            raise FedalignError(f"clients must be a whole number of at least 0, not {self.clients!r}")

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Return True: the server picks among all that are invited."""
        return True

    def select(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> Selection:
        """Admit the clients with the highest plausible losses; of equal losses, the lower numbers."""
        losses = {k: offer.measure.loss for k, offer in offers.items()}
        bound = math.inf if self.most == math.inf else broadcast.loss + (self.most - 1) * abs(broadcast.loss)
        usable = [k for k, loss in losses.items() if math.isfinite(loss) and loss <= bound]
        chosen = tuple(sorted(sorted(usable, key=lambda k: (-losses[k], k))[: self.clients]))
        reasons = {
            k: f"loss {loss:.4g}, {'among' if k in chosen else 'not among'} the {self.clients} highest"
            for k, loss in losses.items()
        }
        reasons |= {
            k: f"loss {loss:.4g}, more than {self.most:g} times F, is not believed"
            for k, loss in losses.items()
            if bound < loss < math.inf
        }
        return Selection(chosen, reasons=reasons)


@dataclass
class LossWeighted(Rule):
    """Multiply each admitted free client's weight by ``(F_k/F)^power``: clients with a higher loss count more.

    After q-FedAvg (Li, Sanjabi, Beirami and Smith, "Fair Resource Allocation in Federated Learning", 2020,
    arXiv:1905.10497), which weighs clients by a power of their loss. Its way to choose the length of a step is left
    out. ``rule`` says who is admitted: everybody, as in FedAvg, or FedALIGN's choice with ``Align(0.2)``. It cannot be
    a rule that needs updates or chooses among candidates. Clients without a finite loss are left out.

    The factor is at most ``most``, whatever loss a client reports: a liar gets ``most`` times its weight, and no more;
    ``inf`` is no bound.

    >>> offers = {2: Offer(Measure(3.0, None, 1)), 3: Offer(Measure(1e300, None, 1))}
    >>> {k: round(x, 6) for k, x in LossWeighted().select(offers, Broadcast(round=0, loss=1.0)).scale.items()}
    {2: 3.0, 3: 10.0}
    """

    power: float = 1.0
    rule: Rule = field(default_factory=Everyone)
    match_on: MatchOn | None = None
    most: float = 10.0

    def __post_init__(self) -> None:
        if not (isinstance(self.power, numbers.Real) and math.isfinite(self.power)):
            raise FedalignError(f"power must be a number, not {self.power!r}")
        _check_most(self.most)
        if self.rule.needs_updates or self.rule.algorithm != Rule.algorithm:
            raise FedalignError(f"LossWeighted weighs one selection by losses, so its rule can't be {self.rule!r}")
        self.match_on = self.match_on or self.rule.match_on
        self.needs_accuracy = self.rule.needs_accuracy
        self.invites_free = self.rule.invites_free

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Offer if the inner rule would."""
        return self.rule.offers(own, broadcast)

    def epsilon_at(self, round: int, rounds: int) -> float | None:
        """Return the ε of the inner rule."""
        return self.rule.epsilon_at(round, rounds)

    def check(self, rounds: int) -> None:
        """Check the settings of the inner rule."""
        self.rule.check(rounds)

    def why(self, own: Measure, broadcast: Broadcast, admitted: bool) -> str:
        """Return the reason that the inner rule gives."""
        return self.rule.why(own, broadcast, admitted)

    def select(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> Selection:
        """Scale the weights of the clients that the inner rule admits."""
        usable = {k: offer for k, offer in offers.items() if math.isfinite(offer.measure.loss)}

        def factor(k: int) -> float:
            ratio = usable[k].measure.loss / broadcast.loss if broadcast.loss > 0 else 1.0
            # As powers of e, and never so large that a sum of them overflows.
            wanted = math.exp(min(max(self.power * math.log(max(ratio, 1e-12)), -300.0), 300.0))
            return min(wanted, self.most)

        inner = self.rule.select(usable, broadcast)
        return replace(inner, scale={k: factor(k) * inner.scale.get(k, 1.0) for k in inner.clients})


def _check_most(most: float) -> None:
    if isinstance(most, bool) or not isinstance(most, numbers.Real) or not most >= 1:
        raise FedalignError(f"most must be a number of at least 1, or inf, not {most!r}")
