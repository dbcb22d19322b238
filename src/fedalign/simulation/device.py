"""Where a simulation computes, and how precisely a GPU multiplies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fedalign.errors import FedalignError


def resolve_device(name: str) -> torch.device:
    """Read ``auto``, ``cpu``, ``cuda`` or ``cuda:1``; auto is the GPU if there is one.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise FedalignError(f"unknown device {name!r}; it must be auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise FedalignError(f"device {name!r} is not supported; it must be auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FedalignError("device 'cuda' was asked for, but PyTorch finds no GPU here; use --device cpu")
    return device


@contextlib.contextmanager
def matmul_precision(tf32: bool) -> Iterator[None]:
    """Choose how a GPU multiplies, and restore the earlier choice. A CPU multiplies in float32 either way."""
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions
