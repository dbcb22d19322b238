"""Convolutions as matrix products, for stacked clients on a GPU.

With weights of its own for every client, a convolution is a grouped one, which the GPU's libraries do slowly. Cut into
patches it is one product per client. Patches are laid out with the channels innermost, so that cutting them and adding
their gradients back both move whole runs of memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class _Patches(torch.autograd.Function):
    """Cut images (samples × height × width × channels) into patches (samples × height × width × kh × kw × channels)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> torch.Tensor:
        cut = x.unfold(1, kernel[0], stride[0]).unfold(2, kernel[1], stride[1])
        return cut.permute(0, 1, 2, 4, 5, 3).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.kernel, ctx.stride = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (g,) = gradients
        back = g.new_zeros(ctx.shape)
        high, wide = g.shape[1], g.shape[2]
        for i in range(ctx.kernel[0]):
            for j in range(ctx.kernel[1]):
                rows = slice(i, i + ctx.stride[0] * (high - 1) + 1, ctx.stride[0])
                columns = slice(j, j + ctx.stride[1] * (wide - 1) + 1, ctx.stride[1])
                back[:, rows, columns] += g[:, :, :, i, j]
        return back, None, None


class ProductConv2d(nn.Module):
    """``nn.Conv2d`` by patches and one product, with the same parameters under the same names."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self._parameters = layer._parameters
        self.kernel, self.stride, self.padding = layer.kernel_size, layer.stride, layer.padding

    weight: torch.Tensor
    bias: torch.Tensor | None

    @staticmethod
    def serves(layer: nn.Module) -> bool:
        """Tell whether a layer is a convolution of the plain kind."""
        return (
            type(layer) is nn.Conv2d
            and layer.groups == 1
            and layer.dilation == (1, 1)
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve."""
        above, beside = (int(side) for side in self.padding)
        if above or beside:
            x = F.pad(x, (beside, beside, above, above))
        patches = _Patches.apply(x.permute(0, 2, 3, 1), self.kernel, self.stride)  # type: ignore[no-untyped-call]
        n, high, wide = patches.shape[:3]
        weight = self.weight.permute(0, 2, 3, 1).reshape(self.weight.shape[0], -1)
        rows = patches.reshape(n * high * wide, -1)
        out = rows @ weight.t() if self.bias is None else torch.addmm(self.bias, rows, weight.t())
        return out.view(n, high, wide, -1).permute(0, 3, 1, 2)


def convolutions_as_products(module: nn.Module) -> nn.Module:
    """Replace a module's plain convolutions (in place)."""
    if ProductConv2d.serves(module):
        return ProductConv2d(module)  # type: ignore[arg-type]
    for name, child in module.named_children():
        setattr(module, name, convolutions_as_products(child))
    return module
