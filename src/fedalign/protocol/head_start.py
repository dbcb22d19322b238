"""What training on free clients is worth to the priority clients, as a part of their loss.

Two models are compared in every round that hold no free client's update of this round: the priority clients' own
aggregate, which went on from a model that free clients helped to train, and the priority-only model, which did not.
Nobody chose them by their losses, so chance favours neither; a served model is chosen among many, and chance favours
it. Free clients that give no head start are not worth the risk: a backdoor, say, costs no loss at all.
"""

from __future__ import annotations

import math

FIRST = 0.02  #: the credit of a run, and of a start from the priority-only model
LEAST = 0.01  #: below it, training begins again from the priority-only model
_NEWEST = 0.1  # weight of a round


def averaged(before: float, own_loss: float, without_free: float) -> float:
    """Average the head start of a round in: the relative difference of two losses, between −1 and 1.

    A round whose ``own_loss`` is not finite says nothing; a loss ``without_free`` that is not finite is the worst.

    >>> round(averaged(0.0, own_loss=1.0, without_free=0.9), 3)
    0.01
    """
    if not math.isfinite(own_loss):
        return before
    now = (own_loss - without_free) / max(abs(own_loss), abs(without_free), 1e-12) if without_free < math.inf else -1.0
    return (1 - _NEWEST) * before + _NEWEST * now
