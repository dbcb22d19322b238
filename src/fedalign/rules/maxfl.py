"""MaxFL: a model that as many clients as possible prefer to training alone."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedalign.rules.rule import MatchOn
from fedalign.rules.weighing import Weighed, WeighingRule

if TYPE_CHECKING:
    from fedalign.protocol.messages import Request
    from fedalign.protocol.trial import Trial


@dataclass(frozen=True)
class MaxFL(WeighingRule):
    """Weigh clients by how close they are to being better off with the shared model than alone.

    Cho, Jhunjhunwala, Li, Smith and Joshi, "Maximizing Global Model Appeal in Federated Learning" (2024,
    arXiv:2205.14840). Client k finds the model appealing if ``F_k(w) < ρ_k``, where ``ρ_k`` is the loss of a model that
    it trained alone. The paper minimises ``Σ_k σ(F_k(w) − ρ_k)`` with the sigmoid σ. So client k's update is weighted
    by ``q_k = σ(F_k − ρ_k) · (1 − σ(F_k − ρ_k))``: clients that nothing can win, or lose, count little. Priority and
    free clients count alike: this is the objective of the incentive, not that of the priority clients.

    Choices where the paper leaves room:

    - ``ρ_k`` is the loss of the model that client k sends in its first round of local work, on the data that rules
      match on (held-out, unless ``match_on`` says otherwise). It is measured once.
    - Weights are normalised; the paper's small constant beside their sum is left out.
    - ``F_k`` and ``ρ_k`` are what clients report. A free client that lies gets a weight of at most 1/4 before the
      normalisation. Where clients may lie, use a rule by which the priority clients measure models.

    >>> round(appeal(loss=0.4, threshold=0.4), 3), round(appeal(loss=5.0, threshold=0.4), 3)
    (0.25, 0.01)
    """

    match_on: MatchOn | None = None

    def weigh(self, trial: Trial) -> Generator[Request, Any, Weighed]:
        """Compare what clients report with what they reached alone."""
        known = {int(k): value for k, value in trial.memory.get("alone", {}).items()}
        first = yield from trial.own_losses(k for k in trial.clients if k not in known)
        alone = {**known, **{k: loss for k, loss in first.items() if math.isfinite(loss)}}
        usable = [k for k in trial.clients if k in alone and math.isfinite(trial.client_loss(k))]
        weights = {k: appeal(trial.client_loss(k), alone[k]) for k in usable}
        reasons = {k: f"loss {trial.client_loss(k):.4g}, alone {alone[k]:.4g}: appeal {weights[k]:.3g}" for k in usable}
        return Weighed(weights, reasons, {"alone": {str(k): loss for k, loss in alone.items()}})


def appeal(loss: float, threshold: float) -> float:
    """Return the sigmoid's slope at ``loss − threshold``: 1/4 where they are equal, 0 far away.

    >>> appeal(1e9, 0.0), appeal(-1e9, 0.0)
    (0.0, 0.0)
    """
    away = math.exp(-min(abs(loss - threshold), 700.0))
    slope = away / (1 + away) ** 2
    return slope if slope > 1e-300 else 0.0
