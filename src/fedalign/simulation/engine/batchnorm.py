"""BatchNorm for stacked clients whose batches are padded, and for batches of one.

Padded rows must not influence the batch's statistics. With one value per channel there is no variance to normalise
with (PyTorch refuses such a batch): the layer then uses its running statistics and doesn't update them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class Padding:
    """The current batch's mask of real rows, and the new running statistics that the BatchNorm layers computed."""

    def __init__(self) -> None:
        self.real: torch.Tensor | None = None  # 1 for a sample, 0 for padding
        self.statistics: dict[str, torch.Tensor] = {}


class _Replacement(nn.Module):
    """A replacement for a BatchNorm layer, with the same parameters and buffers under the same names."""

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        self._parameters = layer._parameters
        self._buffers = layer._buffers
        self.eps, self.momentum = layer.eps, layer.momentum
        self.training = layer.training

    weight: torch.Tensor | None
    bias: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor
    num_batches_tracked: torch.Tensor


class SparingBatchNorm(_Replacement):
    """``nn.BatchNorm*d`` for a single client that accepts batches with one value per channel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise with the batch's statistics, or with the running ones where the batch has no variance."""
        training = self.training and x.numel() > x.shape[1]
        rate = self.momentum
        if training:
            self.num_batches_tracked.add_(1)
            rate = 1 / float(self.num_batches_tracked) if rate is None else rate
        return torch.batch_norm(
            x,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            training,
            rate or 0.0,
            self.eps,
            False,
        )


class MaskedBatchNorm(_Replacement):
    """``nn.BatchNorm*d`` for padded batches: new running statistics are left in ``padding.statistics``, not written."""

    def __init__(self, layer: _BatchNorm, name: str, padding: Padding) -> None:
        super().__init__(layer)
        self.name, self.padding = name, padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise with the mean and variance of the real rows."""
        shape = (1, -1, *(1,) * (x.dim() - 2))
        mean, var = self._statistics(x, shape)
        y = (x - mean.view(shape)) * torch.rsqrt(var.view(shape) + self.eps)
        if self.weight is None:
            return y
        return y * self.weight.view(shape) + self.bias.view(shape)

    def _statistics(self, x: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        old_mean, old_var = self.running_mean, self.running_var
        if not self.training:
            return old_mean, old_var
        real = self.padding.real
        mask = torch.ones(len(x), dtype=x.dtype, device=x.device) if real is None else real
        mask = mask.view(-1, *(1,) * (x.dim() - 1))
        dims = [0, *range(2, x.dim())]
        count = mask.sum() * (x[0, 0].numel())
        some = count.clamp(min=1)  # a client that has finished has an empty batch
        mean = (x * mask).sum(dims) / some
        var = ((x - mean.view(shape)).square() * mask).sum(dims) / some
        enough = count > 1
        mean, var = torch.where(enough, mean, old_mean), torch.where(enough, var, old_var)
        tracked = self.num_batches_tracked + enough.to(self.num_batches_tracked.dtype)
        rate = self.momentum if self.momentum is not None else 1 / tracked.clamp(min=1).to(x.dtype)
        unbiased = var.detach() * (count / (count - 1).clamp(min=1))
        new = self.padding.statistics
        new[f"{self.name}running_mean"] = torch.where(enough, old_mean + rate * (mean.detach() - old_mean), old_mean)
        new[f"{self.name}running_var"] = torch.where(enough, old_var + rate * (unbiased - old_var), old_var)
        new[f"{self.name}num_batches_tracked"] = tracked
        return mean, var


def spare(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm layer of a module (in place) by one that accepts batches with one value per channel."""
    return _replace(module, lambda layer, _: SparingBatchNorm(layer))


def mask(module: nn.Module, padding: Padding) -> nn.Module:
    """Replace every BatchNorm layer of a module (in place) by one that ignores padded rows."""
    return _replace(module, lambda layer, name: MaskedBatchNorm(layer, name, padding))


def statistics(module: nn.Module) -> set[str]:
    """Name the buffers that belong to BatchNorm layers."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in module.named_modules()
        if isinstance(layer, _BatchNorm)
        for name, _ in layer.named_buffers(recurse=False)
    }


def _replace(module: nn.Module, make: Callable[[_BatchNorm, str], nn.Module], prefix: str = "") -> nn.Module:
    if isinstance(module, _BatchNorm):
        return make(module, prefix)
    for name, child in module.named_children():
        setattr(module, name, _replace(child, make, f"{prefix}{name}."))
    return module
