"""BatchNorm of stacked clients with padded batches; on a GPU the forward and backward passes are one kernel each."""

from __future__ import annotations

from typing import Any

import torch

from fedalign.simulation.engine.cnn.reduction_kernels import norm_back_kernel, norm_kernel

Tensors = dict[str, torch.Tensor]


class StackedNorm(torch.autograd.Function):
    """Normalise ``x`` (clients × rows × channels) over each client's real rows; gives the result, mean and variance.

    ``real`` says which samples are real; a sample has one row, or one for each place of its image. A client with fewer
    than two rows is normalised with the running statistics.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        real: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: tuple[torch.Tensor, torch.Tensor],
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalise and save what the backward pass needs."""
        x = x.contiguous()
        affine = (weight.contiguous(), bias.contiguous()) if weight is not None and bias is not None else None
        if x.is_cuda and norm_kernel is not None:
            mean, var = (t.clone(memory_format=torch.contiguous_format) for t in running)
            y = torch.empty_like(x)
            norm_kernel(x, real.contiguous(), affine, (mean, var), y, eps)
        else:
            rows = real.repeat_interleave(x.shape[1] // real.shape[1], 1).unsqueeze(2)
            count = rows.sum(1)
            some, enough = count.clamp(min=1), count > 1
            mean = torch.where(enough, (x * rows).sum(1) / some, running[0])
            spread = ((x - mean.unsqueeze(1)).square() * rows).sum(1) / some
            var = torch.where(enough, spread, running[1])
            y = (x - mean.unsqueeze(1)) * torch.rsqrt(var + eps).unsqueeze(1)
            if affine is not None:
                y = y * affine[0].unsqueeze(1) + affine[1].unsqueeze(1)
        ctx.save_for_backward(x, real, weight, mean, var)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Differentiate with respect to the input, the weight and the bias."""
        x, real, weight, mean, var = ctx.saved_tensors
        g = gradients[0].contiguous()
        if g.is_cuda and norm_back_kernel is not None:
            dx, dw, db = torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)
            scale = weight.contiguous() if weight is not None else None
            norm_back_kernel(x, g, real.contiguous(), scale, (mean, var), (dx, dw, db), ctx.eps)
        else:
            rows = real.repeat_interleave(x.shape[1] // real.shape[1], 1).unsqueeze(2)
            count = rows.sum(1)
            share = torch.where(count > 1, 1 / count.clamp(min=1), torch.zeros_like(count)).unsqueeze(1)
            inverse = torch.rsqrt(var + ctx.eps).unsqueeze(1)
            xhat = (x - mean.unsqueeze(1)) * inverse
            db, dw = (g * rows).sum(1), (g * rows * xhat).sum(1)
            dx = (g - (db.unsqueeze(1) + xhat * dw.unsqueeze(1)) * share) * inverse * rows
            dx = dx * weight.unsqueeze(1) if weight is not None else dx
        return dx, None, dw if weight is not None else None, db if weight is not None else None, None, None


def running_after(
    mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor, running: Tensors, momentum: float | None
) -> Tensors:
    """Give a layer's running statistics after batches of ``count`` (clients × 1) rows; ``running`` are those before."""
    enough = count > 1
    tracked = running["num_batches_tracked"] + enough.squeeze(1).to(running["num_batches_tracked"].dtype)
    rate = momentum if momentum is not None else (1 / tracked.clamp(min=1).to(mean.dtype)).unsqueeze(1)
    unbiased = var * (count / (count - 1).clamp(min=1))
    old_mean, old_var = running["running_mean"], running["running_var"]
    return {
        "running_mean": torch.where(enough, old_mean + rate * (mean - old_mean), old_mean),
        "running_var": torch.where(enough, old_var + rate * (unbiased - old_var), old_var),
        "num_batches_tracked": tracked,
    }
