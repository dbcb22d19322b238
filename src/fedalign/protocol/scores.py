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


def measured_next(plan: Plan, served: tuple[Model, ...], training: Model) -> tuple[tuple[Model, Split], ...]:
    """Return what will be asked at the end of a round in which one of several models is served.

    The next round starts from ``training`` or from the last of the models that may be served.
    """
    wanted: dict[Split, bool] = {"test": plan.has_test, "train": plan.measure_training, "heldout": plan.scores_heldout}
    scored = [(model, split) for model in served for split, measured in wanted.items() if measured]
    return (*scored, (training, plan.match_on), (served[-1], plan.match_on))


def scores_of(
    plan: Plan,
    roster: Roster,
    asked: tuple[tuple[Model, tuple[int, ...]], ...],
    ahead: tuple[tuple[Model, Split], ...] = (),
) -> Generator[Request, Any, Scores]:
    """Let clients measure models; ``asked`` holds pairs of a model and its clients."""

    wanted: dict[Split, bool] = {"test": plan.has_test, "train": plan.measure_training, "heldout": plan.scores_heldout}
    splits = [split for split, measured in wanted.items() if measured]
    means: dict[Split, tuple[float | None, float | None]] = {}
    for split in splits:
        # The first request tells what follows, so that a driver can have everything measured in one exchange.
        rest = [(model, other) for model, _ in asked for other in splits[1:]] if ahead else []
        answers = yield Evaluate(asked, split, (*ahead, *rest) if not means else (), for_record=True)
        measures = {k: m for of_model in answers for k, m in of_model.items() if m.samples}
        means[split] = weighted_mean(roster, measures) if measures else (None, None)
    (test_loss, test_accuracy), (train_loss, _), (heldout_loss, heldout_accuracy) = (
        means.get(split, (None, None)) for split in wanted
    )
    return Scores(test_accuracy, test_loss, train_loss, heldout_accuracy, heldout_loss)
