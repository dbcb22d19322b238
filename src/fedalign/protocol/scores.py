"""Test and training figures of the models that the priority clients have after a round."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

from fedalign.protocol.aggregate import weighted_mean
from fedalign.protocol.messages import Evaluate, Model, Request
from fedalign.protocol.plan import Plan
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Split


class Scores(NamedTuple):
    """Weighted means over the priority clients; None where there is no such data."""

    test_accuracy: float | None
    test_loss: float | None
    train_loss: float | None
    heldout_accuracy: float | None = None
    heldout_loss: float | None = None


def scores(plan: Plan, roster: Roster, served: Model, training: Model | None = None) -> Generator[Request, Any, Scores]:
    """Let all priority clients measure the served model.

    ``training`` is the model that the next round starts from, if it is a different one: the next round asks for its
    loss.
    """
    priority = tuple(k for k, is_priority in enumerate(roster.priority) if is_priority)
    following = served if training is None else training
    return (yield from scores_of(plan, roster, ((served, priority),), ((following, plan.match_on),)))


def scores_of(
    plan: Plan,
    roster: Roster,
    asked: tuple[tuple[Model, tuple[int, ...]], ...],
    ahead: tuple[tuple[Model, Split], ...] = (),
) -> Generator[Request, Any, Scores]:
    """Let clients measure models; ``asked`` holds pairs of a model and its clients."""

    def score(split: Split) -> Generator[Request, Any, tuple[float | None, float | None]]:
        answers = yield Evaluate(asked, split, ahead if split == "test" else ())
        measures = {k: m for of_model in answers for k, m in of_model.items() if m.samples}
        return weighted_mean(roster, measures) if measures else (None, None)

    test_loss, test_accuracy = (yield from score("test")) if plan.has_test else (None, None)
    train_loss, _ = (yield from score("train")) if plan.measure_training else (None, None)
    heldout_loss, heldout_accuracy = (yield from score("heldout")) if plan.scores_heldout else (None, None)
    return Scores(test_accuracy, test_loss, train_loss, heldout_accuracy, heldout_loss)
