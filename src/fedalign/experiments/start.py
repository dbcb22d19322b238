"""Weights that all runs of an experiment start from: those of an earlier run, or of any safetensors file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedalign.errors import FedalignError


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Read a safetensors file; raises :class:`FedalignError` if that is not possible.

    >>> read_weights("none.safetensors")
    Traceback (most recent call last):
    fedalign.errors.FedalignError: start is 'none.safetensors', but there is no such file
    """
    if not Path(path).is_file():
        raise FedalignError(f"start is {path!r}, but there is no such file")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise FedalignError(f"start is {path!r}, which is no safetensors file: {error}") from error


def with_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    """Give a model these weights; raises :class:`FedalignError` if their names or shapes are others."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise FedalignError(f"the weights of start do not fit the model: {' '.join(lines[1:2] or lines)}") from error
    return model
