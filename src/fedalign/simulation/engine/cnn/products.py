"""Convolutions as matrix products, for stacked clients on a GPU.

With weights of its own for every client, a convolution is a grouped one, which the GPU's libraries do slowly. Cut into
patches it is one product per client. Patches are laid out with the channels innermost, so that cutting them and adding
their gradients back both move whole runs of memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fedalign.simulation.engine.cnn.patches import Patches, places


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
        (kh, kw), (sh, sw) = self.kernel, self.stride
        n, high, wide = len(x), places(x.shape[2], kh, sh), places(x.shape[3], kw, sw)
        rows = Patches.apply(x.permute(0, 2, 3, 1), (kh, kw, sh, sw))  # type: ignore[no-untyped-call]
        weight = self.weight.permute(0, 2, 3, 1).flatten(1)
        weight = F.pad(weight, (0, rows.shape[-1] - weight.shape[1]))
        out = rows @ weight.t() if self.bias is None else torch.addmm(self.bias, rows, weight.t())
        return out.view(n, high, wide, -1).permute(0, 3, 1, 2)


def convolutions_as_products(module: nn.Module) -> nn.Module:
    """Replace a module's plain convolutions (in place)."""
    if ProductConv2d.serves(module):
        return ProductConv2d(module)  # type: ignore[arg-type]
    for name, child in module.named_children():
        setattr(module, name, convolutions_as_products(child))
    return module
