"""Tries a model on two samples before any work, and sees that it fits the data and the loss."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedalign.data.federation import Federation
from fedalign.errors import FedalignError
from fedalign.simulation.engine import batchnorm
from fedalign.simulation.engine.jobs import Data
from fedalign.training.losses import PerSampleLoss, cross_entropy

_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)


def check_model(template: nn.Module, data: Data, federations: Sequence[Federation], loss: PerSampleLoss) -> bool:
    """Refuse a model, labels or a loss that don't go together; tell whether there is an accuracy."""
    _refuse_chance(template, data)
    x, y = data.batch(_some_rows(data, 2))
    kind = f"{str(x.dtype).removeprefix('torch.')} samples of shape {tuple(x.shape[1:])}"
    try:
        with torch.no_grad():
            outputs = copy.deepcopy(template).to(data.device).eval()(x)
    except _ERRORS as error:
        raise FedalignError(f"the model does not take {kind}: {_first_line(error)}") from error
    scores = data.has_classes and outputs.dim() > 1 and outputs.shape[1] > 1
    if scores or (data.has_classes and loss is cross_entropy):
        classes = outputs.shape[1] if outputs.dim() > 1 else 1
        for federation in {id(f): f for f in federations}.values():
            _check_labels(federation, classes)
    elif loss is cross_entropy:
        raise FedalignError(
            "the labels are real numbers, which cross-entropy cannot use; use squared-error (fedalign.squared_error)"
        )
    try:
        with torch.no_grad():
            losses = loss(outputs, y)
    except _ERRORS as error:
        shape = tuple(outputs.shape)
        raise FedalignError(f"the loss fails on outputs of shape {shape}: {_first_line(error)}") from error
    if tuple(losses.shape) != (len(y),):
        raise FedalignError(
            f"the loss must give one number per sample; for {len(y)} it gave shape {tuple(losses.shape)}"
        )
    return bool(scores)


def check_repeatable(template: nn.Module) -> None:
    """Refuse layers whose results depend on hidden random state, on who else is in a batch, or aren't there yet."""
    if any(is_lazy(t) for t in [*template.parameters(), *template.buffers()]):
        raise FedalignError("the model has lazy layers, whose shapes aren't known yet; call it once on a sample first")
    for layer in template.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise _chance(type(layer).__name__)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not layer.track_running_stats:
            raise FedalignError(
                f"{type(layer).__name__} without running statistics makes a sample's loss depend on who else is "
                "evaluated with it; set track_running_stats=True"
            )


def _refuse_chance(template: nn.Module, data: Data) -> None:
    """Refuse models that draw random numbers somewhere in their code."""
    x, _ = data.batch(_some_rows(data, 8))
    try:
        with torch.no_grad():
            runs = [batchnorm.spare(copy.deepcopy(template).to(data.device)).train()(x) for _ in range(3)]
    except _ERRORS:
        return  # the check that follows tells what is wrong
    if not all(torch.equal(runs[0], other) or bool(runs[0].isnan().any()) for other in runs[1:]):
        raise _chance("a random layer")


def _chance(what: str) -> FedalignError:
    return FedalignError(
        f"the model has {what}, whose draws come from hidden random state, so results could not be repeated; "
        "leave it out (weight_decay or clip regularise too)"
    )


def _check_labels(federation: Federation, classes: int) -> None:
    if int(federation.pool.y.max()) < classes:
        return
    labels = federation.pool.y.numpy()
    for client in federation.clients:
        for split in ("train", "heldout", "test"):
            rows = client.rows(split)
            if len(rows) and int(labels[rows].max()) >= classes:
                raise FedalignError(
                    f"client {client.name!r} has label {int(labels[rows].max())} in its {split} data, "
                    f"but the model has {classes} outputs (labels 0 to {classes - 1})"
                )


def _some_rows(data: Data, count: int) -> torch.Tensor:
    return torch.arange(count, device=data.device) % len(data.y)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
