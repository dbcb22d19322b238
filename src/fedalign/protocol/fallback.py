"""Compares AutoALIGN's choice with the priority-only model, and says which of them to serve.

In every round the choice is no worse on held-out data than the priority clients' own aggregate of that round. That is
no promise for the run: free clients may lower this round's loss and undo what later rounds would have built on. So
FedAvg on the priority clients is trained as well, and both models are measured on their held-out data. While the choice
is worse (accuracy, smoothed over some ten rounds; without classes, loss), the priority-only model is served. Unless
good rounds give credit, it is also served in every single round in which the choice is worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from fedalign.protocol.aggregate import weighted_mean
from fedalign.protocol.records import Fallback
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Measure

#: How the clients' measures of a model become one loss and one accuracy.
Mean = Callable[[Roster, Mapping[int, Measure]], tuple[float, float | None]]

SMOOTHING = 0.1  #: weight of a new round in the smoothed deficit
MARGIN = 0.005  #: the smoothed deficit, in accuracy (or as a part of the loss), above which the fallback is served
MARGIN_NOW = 0.01  #: the deficit of a single round, not smoothed, that serves the fallback where there is no credit


def assess(
    roster: Roster,
    before: Fallback,
    chosen: Mapping[int, Measure],
    priority_only: Mapping[int, Measure],
    *,
    credit: bool = True,
    mean: Mean = weighted_mean,
) -> Fallback:
    """Update the smoothed deficit of the choice, by the clients that measured both models.

    With ``credit``, rounds in which the choice was better make up for later ones. Without, the deficit is never
    negative, and a choice is behind at once if its loss is higher, if its accuracy is lower by more than one point, or
    if no client measured both models. ``mean`` averages the clients' measures.

    >>> roster, one = Roster(("a",), (True,), (10,)), {0: Measure(1.0, 0.6, 10)}
    >>> assess(roster, Fallback(apart=True), one, {0: Measure(1.0, 0.7, 10)}).behind
    True
    """
    both = [k for k in chosen if k in priority_only]
    if not both:
        return replace(before, apart=True) if credit else Fallback(True, deficit=before.deficit, behind=True)
    loss, accuracy = mean(roster, {k: chosen[k] for k in both})
    own_loss, own_accuracy = mean(roster, {k: priority_only[k] for k in both})
    if not math.isfinite(loss) or not math.isfinite(own_loss):
        # Not smoothed: the average would never recover from an infinity.
        return Fallback(True, own_loss, own_accuracy, before.deficit, behind=math.isfinite(own_loss))
    if accuracy is not None and own_accuracy is not None:
        now = own_accuracy - accuracy
    else:
        now = (loss - own_loss) / max(abs(loss), abs(own_loss), 1e-12)  # of the larger one: between −1 and 1
    deficit = (1 - SMOOTHING) * before.deficit + SMOOTHING * now
    behind = deficit > MARGIN
    if not credit:
        deficit, behind = max(0.0, deficit), behind or loss > own_loss or now > MARGIN_NOW
    return Fallback(True, own_loss, own_accuracy, deficit, behind)
