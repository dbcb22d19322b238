"""Converts models and measures to Flower's records. Clients send weights, losses, accuracies and counts only."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic

from fedalign.aggregation.update_checks import wrong_format
from fedalign.errors import FedalignError
from fedalign.protocol.messages import Outcomes
from fedalign.rules.rule import Broadcast, Measure

HELLO, MEASURE, TRAIN = "query.hello", "evaluate", "train"


def put_model(content: RecordDict, model: torch.Tensor) -> None:
    """Put a flat model into a message, or several as one stacked array, which is faster than several arrays."""
    content["model"] = ArrayRecord({"flat": Array(model.detach().cpu().numpy())})


def get_models(content: RecordDict, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a message's flat models, stacked; raises :class:`FedalignError` for anything else.

    The header is checked against the expected shape and type, and against the bytes that came, before any memory is
    taken for the array: a stranger wrote it.
    """
    record = content.get("model")
    if not isinstance(record, ArrayRecord) or list(record) != ["flat"]:
        raise FedalignError("it sent no model")
    wanted = torch.empty(0, dtype=dtype).numpy().dtype
    try:
        file = io.BytesIO(record["flat"].data)
        header = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}[read_magic(file)]
        shape, in_columns, found = header(file)
        rest = file.getbuffer()[file.tell() :]
    except Exception as error:  # whatever these bytes make the reader raise, they are not a model
        raise FedalignError(f"its model cannot be read ({type(error).__name__})") from error
    if (wrong := wrong_format(shape, str(found), size, str(wanted))) is not None:
        raise FedalignError(wrong)
    if (in_columns and len(shape) > 1) or len(rest) != math.prod(shape) * wanted.itemsize:
        raise FedalignError(f"its model cannot be read: {len(rest)} bytes came for the shape {shape}")
    return torch.from_numpy(np.frombuffer(rest, wanted).copy()).reshape(-1, size)


def get_model(content: RecordDict, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a message's one flat model; raises :class:`FedalignError` if there is not exactly one."""
    models = get_models(content, size, dtype)
    if len(models) != 1:
        raise FedalignError(f"it sent {len(models)} models, not one")
    return models[0]


def put_measures(content: RecordDict, measures: Mapping[str, Measure]) -> None:
    """Put measures into a message, each under a name."""
    values: dict[str, int | float] = {}
    for name, measure in measures.items():
        values |= {f"{name}.loss": float(measure.loss), f"{name}.samples": int(measure.samples)}
        if measure.accuracy is not None:
            values[f"{name}.accuracy"] = float(measure.accuracy)
    content["measures"] = MetricRecord(values)  # type: ignore[arg-type]


def get_measure(content: RecordDict, name: str) -> Measure | None:
    """Return a measure from a message; None if it is missing or its values are not possible."""
    record = content.get("measures")
    if not isinstance(record, MetricRecord):
        return None
    loss, samples, accuracy = (record.get(f"{name}.{what}") for what in ("loss", "samples", "accuracy"))
    if not isinstance(loss, int | float) or not isinstance(samples, int) or samples < 1:
        return None
    if accuracy is not None and not (isinstance(accuracy, int | float) and 0 <= accuracy <= 1):
        return None
    return Measure(float(loss), None if accuracy is None else float(accuracy), samples)


def put_outcomes(content: RecordDict, outcomes: Outcomes | None) -> None:
    """Put into a message how two models did on the same samples; nothing where they could not be compared."""
    values = {} if outcomes is None else vars(outcomes)
    content["outcomes"] = MetricRecord(dict(values))


def get_outcomes(content: Mapping[str, object]) -> Outcomes | None:
    """Return the outcomes of a message; None if they are missing or their values are not possible."""
    record = content.get("outcomes")
    if not isinstance(record, MetricRecord):
        return None
    gained, lost, samples = (record.get(name) for name in ("gained", "lost", "samples"))
    if not isinstance(samples, int) or samples < 1:
        return None
    if not isinstance(gained, int | float) or not isinstance(lost, int | float):
        return None
    if not (gained >= 0 and lost >= 0 and gained + lost <= samples):  # NaN fails, too
        return None
    return Outcomes(float(gained), float(lost), samples)


def put_task(
    content: RecordDict,
    client: int,
    round: int,
    rounds: int,
    split: str,
    priority: bool,
    broadcast: Broadcast | None,
    *,
    paired: bool = False,
) -> None:
    """Put into a message what the client needs besides the model: its number and role, the round, the broadcast.

    ``paired`` asks for a comparison of the message's two models, sample by sample, in place of measures.
    """
    values: dict[str, int | float | str | bool] = {
        "client": client,
        "round": round,
        "rounds": rounds,
        "split": split,
        "priority": priority,
    }
    if paired:
        values["paired"] = True
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
