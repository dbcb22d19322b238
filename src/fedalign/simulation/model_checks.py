"""Checks before a run that a model fits the data and the loss, and that its results can be repeated."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedalign.data.federation import Federation
from fedalign.errors import FedalignError, FederationWarning
from fedalign.simulation.engine import batchnorm
from fedalign.simulation.engine.jobs import Data
from fedalign.simulation.engine.random_functions import HashedDraws
from fedalign.training.losses import PerSampleLoss, binary_cross_entropy, classes_first, cross_entropy, has_logits

_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)


def check_model(template: nn.Module, data: Data, federations: Sequence[Federation], loss: PerSampleLoss) -> bool:
    """Refuse a model, labels or a loss that don't fit each other; return whether accuracies can be computed."""
    _use_numbers(template, data)
    x, y = data.batch(_some_rows(data, 2))
    outputs = _outputs(template, x, data)
    _refuse_hidden_randomness(template, data)
    accuracy = _check_targets(outputs, y, {id(f): f for f in federations}.values(), loss)
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
    return accuracy


def _use_numbers(template: nn.Module, data: Data) -> None:
    """Turn whole numbers into floating-point ones if the model takes these alone: they are features, not tokens."""
    if data.x.is_floating_point() or data.x.dtype == torch.uint8:
        return  # uint8 data become numbers batch by batch
    x, _ = data.batch(_some_rows(data, 2))
    module = copy.deepcopy(template).to(data.device).eval()
    with torch.no_grad(), HashedDraws(None):
        try:
            module(x)
        except _ERRORS:
            try:
                module(x.to(data.dtype))
            except _ERRORS:
                return  # the check that follows reports what is wrong
            data.x = data.x.to(data.dtype)


def _outputs(template: nn.Module, x: torch.Tensor, data: Data) -> torch.Tensor:
    kind = f"{str(x.dtype).removeprefix('torch.')} samples of shape {tuple(x.shape[1:])}"
    try:
        with torch.no_grad(), HashedDraws(None):
            outputs = copy.deepcopy(template).to(data.device).eval()(x)
    except FedalignError:
        raise
    except _ERRORS as error:
        pixels = data.x.dtype == torch.uint8 and any(isinstance(m, nn.Embedding) for m in template.modules())
        hint = "; uint8 data are pixels and become x/255: give tokens as int64" if pixels else ""
        raise FedalignError(f"the model does not take {kind}: {_first_line(error)}{hint}") from error
    if not isinstance(outputs, torch.Tensor):
        raise FedalignError(
            f"the model must return a tensor, not a {type(outputs).__name__}; wrap it in a module that returns one"
        )
    return outputs


def _check_targets(
    outputs: torch.Tensor, y: torch.Tensor, federations: Iterable[Federation], loss: PerSampleLoss
) -> bool:
    """Refuse targets that the outputs or the loss cannot have; return whether there is an accuracy.

    There is one for scores of classes, and for logits of two classes or of several labels (:func:`losses.hits`). A
    single output under a loss of the user's own may be anything, so it has none.
    """
    classes = not y.is_floating_point()
    if loss is binary_cross_entropy or (classes and y.dim() > 1 and has_logits(outputs, y)):
        for federation in federations:
            _check_binary(federation)
        return has_logits(outputs, y)
    scores = classes and outputs.dim() > 1 and outputs.shape[1] > 1
    if scores and y.dim() == 2 and y.shape[1] == 1 and outputs.dim() == 2:
        raise FedalignError("the labels have the shape (n, 1), as one label of several; give class numbers as (n,)")
    if scores or (classes and loss is cross_entropy):
        found = classes_first(outputs, y)
        _warn_of_two_readings(outputs, y)
        for federation in federations:
            _check_labels(federation, found.shape[1] if found.dim() > 1 else 1)
    elif loss is cross_entropy:
        raise FedalignError(
            "the labels are real numbers, which cross-entropy cannot use; use squared-error (fedalign.squared_error)"
        )
    return scores and classes_first(outputs, y)[:, 0].shape == y.shape


def check_repeatable(template: nn.Module) -> None:
    """Refuse lazy layers, and layers that make a sample's loss depend on the other samples of its batch."""
    if any(is_lazy(t) for t in [*template.parameters(), *template.buffers()]):
        raise FedalignError("the model has lazy layers, whose shapes aren't known yet; call it once on a sample first")
    for layer in template.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not layer.track_running_stats:
            raise FedalignError(
                f"{type(layer).__name__} without running statistics makes a sample's loss depend on who else is "
                "evaluated with it; set track_running_stats=True"
            )


def _refuse_hidden_randomness(template: nn.Module, data: Data) -> None:
    """Refuse models whose outputs or gradients differ between calls although every draw of PyTorch's is hashed."""
    x, _ = data.batch(_some_rows(data, 8))
    key = torch.zeros((), dtype=torch.int64, device=data.device)
    runs = []
    try:
        for _ in range(3):
            module = batchnorm.spare(copy.deepcopy(template).to(data.device)).train()
            with HashedDraws(key):
                outputs = module(x)
            parameters = [p for p in module.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(outputs.sum(), parameters, allow_unused=True)
            runs.append([outputs.detach(), *(g for g in gradients if g is not None)])
    except FedalignError:
        raise
    except _ERRORS:
        return  # the check that follows reports what is wrong
    for other in runs[1:]:
        if not all(_same(a, b) or bool(a.isnan().any()) for a, b in zip(runs[0], other, strict=True)):
            raise FedalignError(
                "the model draws random numbers from hidden state (Python's or NumPy's generator, or compiled code), "
                "so results could not be repeated; draw them with torch.rand or nn.Dropout"
            )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two calls gave the same numbers; on a GPU, but for the order in which its kernels add.

    >>> one = torch.ones(3)
    >>> _same(one, one * (1 + 1e-6)), _same(one, one.clone())
    (False, True)
    """
    if a.device.type == "cpu":
        return torch.equal(a, b)
    largest = float(a.abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * largest)


def _check_labels(federation: Federation, classes: int) -> None:
    if int(federation.pool.y.max()) < classes:
        return
    labels = federation.pool.y.numpy()
    for client in federation.clients:
        for split in ("train", "heldout", "test"):
            rows = client.rows(split)
            if len(rows) and int(labels[rows].max()) >= classes:
                hint = "; one logit for two classes needs the loss binary-cross-entropy" if classes == 1 else ""
                raise FedalignError(
                    f"client {client.name!r} has label {int(labels[rows].max())} in its {split} data, "
                    f"but the model has {classes} outputs (labels 0 to {classes - 1}){hint}"
                )


def _check_binary(federation: Federation) -> None:
    """Refuse targets other than 0 and 1."""
    y = federation.pool.y
    if bool(((y == 0) | (y == 1)).all()):
        return
    wrong = y[(y != 0) & (y != 1)].reshape(-1)[0].item()
    raise FedalignError(
        f"the targets hold {wrong:g}, but the model has one logit for each of them, so they must be 0 or 1"
    )


def _warn_of_two_readings(outputs: torch.Tensor, y: torch.Tensor) -> None:
    """Say how scores are read whose classes may be the second or the last dimension."""
    positions = tuple(y.shape[1:])
    if positions and tuple(outputs.shape[1:-1]) == positions == tuple(outputs.shape[2:]):
        warnings.warn(
            f"outputs of shape (n, {', '.join(map(str, outputs.shape[1:]))}) are read as (samples, positions, classes)",
            FederationWarning,
            stacklevel=5,
        )


def _some_rows(data: Data, count: int) -> torch.Tensor:
    return torch.arange(count, device=data.device) % len(data.y)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
