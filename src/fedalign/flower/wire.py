"""Converts models and measures to Flower's records. Clients send weights, losses, accuracies and counts only."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic

from fedalign.aggregation.update_checks import wrong_format
from fedalign.errors import FedalignError
from fedalign.protocol.messages import Outcomes
from fedalign.rules.rule import Broadcast, Measure

HELLO, MEASURE, TRAIN, KEEP, BENCHED = "query.hello", "evaluate", "train", "query.keep", "query.benched"
PERSONAL = "query.personal"
ACCOUNT = "query.account"
_LONGEST_HEADER = 512  # characters, of an array; that of a model has 118
MOST_SAMPLES = 1 << 53  #: that a client may report; above it a float does not count by one
LARGEST = 1e100  #: of a loss or a metric: sums and differences of what strangers report must be numbers


def put_model(content: RecordDict, model: torch.Tensor) -> None:
    """Put a flat model into a message, or several as one stacked array, which is faster than several arrays."""
    content["model"] = ArrayRecord({"flat": Array(_as_numpy(model))})


def put_models(content: RecordDict, models: Sequence[torch.Tensor]) -> None:
    """Put one or more flat models into a message."""
    put_model(content, models[0] if len(models) == 1 else torch.stack(list(models)))


def get_models(content: RecordDict, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a message's flat models, stacked; raises :class:`FedalignError` for anything else.

    The header is checked against the expected shape and type, and against the bytes that came, before any memory is
    taken for the array: a stranger wrote it.
    """
    record = content.get("model")
    if not isinstance(record, ArrayRecord) or list(record) != ["flat"]:
        raise FedalignError("it sent no model")
    wanted = _as_numpy(torch.empty(0, dtype=dtype)).dtype
    try:
        file = io.BytesIO(record["flat"].data)
        header = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}[read_magic(file)]
        shape, in_columns, found = header(file, max_header_size=_LONGEST_HEADER)
        rest = file.getbuffer()[file.tell() :]
    except Exception as error:  # whatever these bytes make the reader raise, they are not a model
        raise FedalignError(f"its model cannot be read ({type(error).__name__})") from error
    if (wrong := wrong_format(shape, str(found), size, str(wanted))) is not None:
        raise FedalignError(wrong)
    if (in_columns and len(shape) > 1) or len(rest) != math.prod(shape) * wanted.itemsize:
        raise FedalignError(f"its model cannot be read: {len(rest)} bytes came for the shape {shape}")
    return torch.from_numpy(np.frombuffer(rest, wanted).copy()).view(dtype).reshape(-1, size)


def _as_numpy(model: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a model as a NumPy array. NumPy has no bfloat16; such numbers are whole numbers of the same bits there."""
    model = model.detach().cpu()
    return (model.view(torch.int16) if model.dtype == torch.bfloat16 else model).numpy()


def get_model(content: RecordDict, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a message's one flat model; raises :class:`FedalignError` if there is not exactly one."""
    models = get_models(content, size, dtype)
    if len(models) != 1:
        raise FedalignError(f"it sent {len(models)} models, not one")
    return models[0]


def put_wishes(content: RecordDict, *, model: bool, personal: bool) -> None:
    """Put into a message whether the client's owner keeps the final model, and wants personal models of it."""
    wishes = {"model": model, "personal": personal}
    if any(wishes.values()):
        content["wishes"] = ConfigRecord({name: True for name, wished in wishes.items() if wished})


def keeps_models(content: RecordDict) -> bool:
    """Say whether a client's owner keeps delivered models; not if the message does not say so."""
    return _wishes(content, "model")


def wants_personal(content: RecordDict) -> bool:
    """Say whether a client's owner wants its node to make personal models."""
    return _wishes(content, "personal")


def _wishes(content: RecordDict, what: str) -> bool:
    wishes = content.get("wishes")
    return isinstance(wishes, ConfigRecord) and wishes.get(what) is True


def losses(content: RecordDict) -> dict[str, float]:
    """Return the losses among a message's measures, by the measure's name."""
    record = content.get("measures")
    found = record.items() if isinstance(record, MetricRecord) else ()
    return {name.removesuffix(".loss"): float(value) for name, value in found if name.endswith(".loss")}  # type: ignore[arg-type]


def put_measures(content: RecordDict, measures: Mapping[str, Measure]) -> None:
    """Put measures into a message, each under a name."""
    values: dict[str, int | float | list[float]] = {}
    for name, measure in measures.items():
        values |= {f"{name}.loss": float(measure.loss), f"{name}.samples": int(measure.samples)}
        if measure.accuracy is not None:
            values[f"{name}.accuracy"] = float(measure.accuracy)
        if measure.tempered:
            values[f"{name}.tempered"] = list(measure.tempered)
    content["measures"] = MetricRecord(values)  # type: ignore[arg-type]


def get_measure(content: RecordDict, name: str) -> Measure | None:
    """Return a measure from a message; None if it is missing or its values are not possible.

    A loss may be infinite or NaN, as that of a model that diverges is, but no finite number above ``LARGEST``.
    """
    record = content.get("measures")
    if not isinstance(record, MetricRecord):
        return None
    loss, samples = number(record.get(f"{name}.loss")), count(record.get(f"{name}.samples"))
    accuracy = number(record.get(f"{name}.accuracy"))
    if loss is None or samples is None or LARGEST < abs(loss) < math.inf:
        return None
    if f"{name}.accuracy" in record and not (accuracy is not None and 0 <= accuracy <= 1):
        return None
    tempered = record.get(f"{name}.tempered")
    losses = [number(one) for one in tempered] if isinstance(tempered, list) else []
    return Measure(loss, accuracy, samples, tuple(one for one in losses if one is not None and abs(one) <= LARGEST))


def number(value: object) -> float | None:
    """Return a value as a float; None if it is no number, as a list is not, or too large. NaN is a number here.

    >>> number(3), number([3.0]), number("3"), number(10**400)
    (3.0, None, None, None)
    """
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except OverflowError:
        return None


def count(value: object) -> int | None:
    """Return a value as a number of samples; None if it is no whole number, below 1 or too large to be one.

    >>> count(50), count(0), count(50.0), count(10**400)
    (50, None, None, None)
    """
    return int(value) if type(value) is int and 1 <= value <= MOST_SAMPLES else None


def put_outcomes(content: RecordDict, outcomes: Outcomes | None) -> None:
    """Put into a message how two models did on the same samples; nothing where they could not be compared."""
    values = {} if outcomes is None else vars(outcomes)
    content["outcomes"] = MetricRecord(dict(values))


def get_outcomes(content: Mapping[str, object]) -> Outcomes | None:
    """Return the outcomes of a message; None if they are missing or their values are not possible."""
    record = content.get("outcomes")
    if not isinstance(record, MetricRecord):
        return None
    gained, lost, samples = number(record.get("gained")), number(record.get("lost")), count(record.get("samples"))
    if gained is None or lost is None or samples is None:
        return None
    if not (gained >= 0 and lost >= 0 and gained + lost <= samples):  # NaN fails, too
        return None
    return Outcomes(gained, lost, samples)


def put_questions(
    content: RecordDict,
    client: int,
    rounds: int,
    priority: bool,
    measures: Sequence[str],
    compare: tuple[int, int, str] | None = None,
    tempered: str | None = None,
) -> None:
    """Put into a message what to do with its models: ``heldout-1`` measures the second one on held-out data.

    ``compare`` asks for a comparison of two models, by their places, sample by sample on a split. ``tempered`` names a
    split for which losses at other temperatures are asked, too.
    """
    put_task(content, client, 0, rounds, "heldout", priority, None)
    task = content["task"]
    assert isinstance(task, ConfigRecord)
    if measures:
        task["measures"] = list(measures)
    if compare is not None:
        task["compare"], task["split"] = list(compare[:2]), compare[2]
    if tempered is not None:
        task["tempered"] = tempered


def get_questions(task: Mapping[str, object], models: int) -> dict[str, list[int]]:
    """Return the places of the models to measure, by split.

    Raises :class:`FedalignError` for a question about a model that is not among the message's.

    >>> get_questions({"measures": ["heldout-0", "test-0", "heldout-1"]}, models=2)
    {'heldout': [0, 1], 'test': [0]}
    """
    found: dict[str, list[int]] = {}
    asked = task.get("measures", [])
    for one in asked if isinstance(asked, list) else []:
        split, _, place = str(one).rpartition("-")
        if split not in ("train", "heldout", "test") or not place.isdecimal() or int(place) >= models:
            raise FedalignError(f"the server asks for {one!r} of {models} models: is it of another version?")
        found.setdefault(split, []).append(int(place))
    return found


def put_task(
    content: RecordDict,
    client: int,
    round: int,
    rounds: int,
    split: str,
    priority: bool,
    broadcast: Broadcast | None,
) -> None:
    """Put into a message what the client needs besides the model: its number and role, the round, the broadcast."""
    values: dict[str, int | float | str | bool] = {
        "client": client,
        "round": round,
        "rounds": rounds,
        "split": split,
        "priority": priority,
    }
    if broadcast is not None:
        values["loss"] = broadcast.loss
        if broadcast.accuracy is not None:
            values["accuracy"] = broadcast.accuracy
        if broadcast.epsilon is not None:
            values["epsilon"] = broadcast.epsilon if math.isfinite(broadcast.epsilon) else "inf"
    content["task"] = ConfigRecord(values)  # type: ignore[arg-type]


def get_broadcast(task: Mapping[str, object]) -> Broadcast:
    """Return the broadcast that a task holds."""
    epsilon, accuracy = task.get("epsilon"), task.get("accuracy")
    return Broadcast(
        int(task["round"]),  # type: ignore[call-overload]
        float(task["loss"]),  # type: ignore[arg-type]
        None if accuracy is None else float(accuracy),  # type: ignore[arg-type]
        None if epsilon is None else float(epsilon),  # type: ignore[arg-type]
    )
