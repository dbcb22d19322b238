"""FedGP and FedDA: free clients as sources, priority clients as the target, with weights in closed form."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedalign.errors import FedalignError
from fedalign.rules.rule import Broadcast, MatchOn, Measure, Offer, Rule, Selection

Beta = float | Literal["auto"]
_UNKNOWN = 0.5  # the paper's weight where it is not computed
_LARGEST = 0.999  # of the sources' weight: the priority clients always take part


@dataclass(frozen=True)
class FedDA(Rule):
    """Combine the priority clients' mean update with every free client's: ``(1−β_k)·g_T + β_k·g_k``, averaged over k.

    Jiang, Zhang and Koyejo, "Principled Federated Domain Adaptation: Gradient Projection and Auto-Weighting" (2024,
    arXiv:2302.05049). The target are the priority clients, the sources are the free ones. With ``beta="auto"``,
    ``β_k = σ² / (σ² + d_k²)``, where ``σ²`` is the variance of the target's update ``g_T`` and ``d_k`` its distance
    from the source's, corrected for that variance. A source that is no further away than the noise counts fully.

    Choices where the paper leaves room:

    - The paper estimates ``σ²`` from the batches of one target client. Here it comes from how much the priority
      clients' updates differ. So it also holds their heterogeneity, and favours free clients where they differ much.
      With one priority client, ``β_k`` is 0.5, as the paper has it where weights are not computed.
    - Updates are those of a round's local work, where the paper compares gradients of a step. A source with more data
      takes more steps, is further away and counts less.
    - Sources count alike, as in the paper's theory, not by the sample counts that they claim.
    - The target keeps at least a thousandth of the weight.

    >>> from fedalign import Similarity
    >>> offer = Offer(Measure(1.0, None, 1), Similarity(cosine=0.0, length=1.0), noise=0.5)
    >>> FedDA().select({3: offer}, Broadcast(round=0, loss=1.0)).reasons
    {3: 'beta 0.25'}
    """

    beta: Beta = "auto"
    match_on: MatchOn | None = None
    needs_updates = True

    def __post_init__(self) -> None:
        number = isinstance(self.beta, numbers.Real) and not isinstance(self.beta, bool)
        if self.beta != "auto" and not (number and 0 <= float(self.beta) <= 1):
            raise FedalignError(f"{type(self).__name__}'s beta must be 'auto' or from 0 to 1, not {self.beta!r}")

    def offers(self, own: Measure, broadcast: Broadcast) -> bool:
        """Return True: the update decides, not the loss."""
        return True

    def select(self, offers: Mapping[int, Offer], broadcast: Broadcast) -> Selection:
        """Weigh the sources that are usable, relative to a weight of 1 for the target."""
        step = {k: self.factor(offer) for k, offer in offers.items() if offer.length > 0}
        betas = {k: self.beta_of(offers[k]) for k, factor in step.items() if factor > 0}
        target = max(1 - _LARGEST, 1 - sum(betas.values()) / max(1, len(betas)))
        weight = {k: beta / len(betas) / target for k, beta in betas.items() if beta > 0}
        reasons = {k: f"beta {betas[k]:.3g}" if k in betas else "points away, or nowhere" for k in offers}
        return Selection(tuple(weight), weight=weight, step={k: step[k] for k in weight}, reasons=reasons)

    def beta_of(self, offer: Offer) -> float:
        """Return a source's weight ``β_k``."""
        if self.beta != "auto":
            return float(self.beta)
        if offer.noise is None:
            return _UNKNOWN
        largest = max(offer.noise, self.bias(offer))
        return offer.noise / largest if largest > 0 else 1.0

    def bias(self, offer: Offer) -> float:
        """Return how far what a source contributes is from the target's update, relative to its squared length."""
        assert offer.similarity is not None, "rules that need updates are given similarities"
        return offer.similarity.distance

    def factor(self, offer: Offer) -> float:
        """Return what a source's update is multiplied by; 0 leaves the source out."""
        return 1.0


@dataclass(frozen=True)
class FedGP(FedDA):
    """FedDA with the target's update projected on each source's: ``(1−β_k)·g_T + β_k·max(0, ⟨g_T, u_k⟩)·u_k``.

    From the same paper (arXiv:2302.05049); ``u_k`` is the source's update divided by its length. A source whose update
    points away from the target's is left out. With ``beta="auto"``, ``β_k = σ² / (σ² + ‖g_T − proj‖²)``, where the
    residual is corrected for the noise.

    A further choice: sources that are left out do not count in the average. In the paper's formula they would shorten
    the target's step. Projections are those of the whole model, as in the paper's formulas, where the authors' code
    projects every layer.

    >>> from fedalign import Similarity
    >>> offers = {k: Offer(Measure(1.0, None, 1), Similarity(c, 2.0), noise=0.1) for k, c in ((2, 0.9), (3, -0.2))}
    >>> chosen = FedGP().select(offers, Broadcast(round=0, loss=1.0))
    >>> chosen.clients, chosen.step
    ((2,), {2: 0.45})
    """

    def bias(self, offer: Offer) -> float:
        """Return the squared part of the target's update that the projection loses."""
        return max(0.0, 1.0 - offer.cosine**2)

    def factor(self, offer: Offer) -> float:
        """Return the length of the projection over that of the source's update."""
        return max(0.0, offer.cosine) / offer.length
