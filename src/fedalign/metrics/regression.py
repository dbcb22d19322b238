"""Metrics of regression."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of ``|output − target|``.

    >>> mean_absolute_error(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 2.0])).item()
    1.5
    """
    return (outputs.reshape(targets.shape) - targets).double().abs().mean()


def root_mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the root of the mean of ``(output − target)²``.

    >>> root_mean_squared_error(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0])).item()
    3.0
    """
    return (outputs.reshape(targets.shape) - targets).double().square().mean().sqrt()


def r2(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the coefficient of determination, 1 − Σ(output − target)² / Σ(target − mean)²; NaN for equal targets.

    >>> r2(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0])).item()
    1.0
    """
    truth = targets.double()
    spread = (truth - truth.mean(0)).square().sum()
    rest = (outputs.reshape(targets.shape).double() - truth).square().sum()
    return torch.where(spread > 0, 1 - rest / spread, torch.nan)
