"""Bias, ReLU and max-pooling in one pass over the activations, with a backward pass of one more."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fedalign.simulation.engine.cnn.kernels import Pair, pool_kernel, unpool_kernel


def poolable(relu: nn.Module, pool: nn.Module) -> Pair | None:
    """Give the windows' size if two layers are a ReLU and a max-pooling of windows that don't overlap."""
    if type(relu) is not nn.ReLU or type(pool) is not nn.MaxPool2d:
        return None
    kernel, stride, padding, dilation = (
        (side, side) if isinstance(side, int) else (side[0], side[1])
        for side in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    )
    plain = kernel == stride and padding == (0, 0) and dilation == (1, 1) and not pool.ceil_mode
    return kernel if plain and not pool.return_indices and kernel[0] * kernel[1] < 128 else None


class ReluPool(torch.autograd.Function):
    """``max_pool2d(relu(x + bias))`` of images with their channels innermost; a bias is a row for each client."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, kernel: Pair) -> torch.Tensor:
        """Add the bias, apply ReLU and pool; remember each window's largest place."""
        n, high, wide, channels = x.shape
        ctx.shape, ctx.kernel, ctx.clients = x.shape, kernel, len(bias) if bias is not None else 1
        if x.is_cuda and pool_kernel is not None:
            out = x.new_empty((n, high // kernel[0], wide // kernel[1], channels))
            which = torch.empty_like(out, dtype=torch.int8)
            pool_kernel(x.contiguous(), bias.contiguous() if bias is not None else None, out, which, kernel)
        else:
            if bias is not None:
                x = (x.view(len(bias), -1, channels) + bias.unsqueeze(1)).view(x.shape)
            best, at = F.max_pool2d(x.permute(0, 3, 1, 2), kernel, return_indices=True)
            best, at = best.permute(0, 2, 3, 1), at.permute(0, 2, 3, 1)
            which = (at // wide % kernel[0] * kernel[1] + at % wide % kernel[1]).to(torch.int8)
            which, out = which.masked_fill(best <= 0, -1), best.relu()
        ctx.save_for_backward(which)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Pass each window's gradient to its largest number."""
        (which,), (kh, kw), g = ctx.saved_tensors, ctx.kernel, gradients[0]
        back = g.new_empty(ctx.shape)
        if g.is_cuda and unpool_kernel is not None:
            unpool_kernel(g.contiguous(), which, back, ctx.kernel)
        else:
            back.zero_()
            inner = back[:, : which.shape[1] * kh, : which.shape[2] * kw]
            for i in range(kh):
                for j in range(kw):
                    inner[:, i::kh, j::kw] = g.masked_fill(which != i * kw + j, 0)
        to_bias = back.view(ctx.clients, -1, ctx.shape[3]).sum(1) if ctx.needs_input_grad[1] else None
        return back, to_bias, None
