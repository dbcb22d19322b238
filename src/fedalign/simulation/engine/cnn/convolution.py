"""Convolutions as matrix products, for stacked clients on a GPU.

With weights of its own for every client, a convolution is a grouped one, which the GPU's libraries do slowly. Cut into
patches it is one product per client. Images are stored with the channels innermost (samples × height × width ×
channels), so that cutting patches and adding their gradients back copy contiguous runs of memory. On a GPU each is one
pass, written in Triton, which comes with PyTorch's CUDA builds; elsewhere it is plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from fedalign.simulation.engine.cnn.kernels import add_kernel, cut_kernel

_ALIGNED = 4  # numbers: the matmul kernels read 16 bytes at a time
Size = tuple[int, int, int, int]  # the kernel's height and width, the strides down and across


def is_plain(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Tell whether a layer is a convolution that is written as products here: no groups, no dilation, zero padding.

    >>> is_plain(nn.Conv2d(3, 8, 5, padding=2)), is_plain(nn.Conv2d(4, 4, 3, groups=2))
    (True, False)
    """
    return (
        type(layer) is nn.Conv2d
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def convolve(
    images: torch.Tensor,
    weight: torch.Tensor,
    padding: tuple[int, int],
    stride: tuple[int, int],
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Convolve images ([clients ×] samples × height × width × channels) with ``nn.Conv2d``'s weights, without bias.

    ``weight`` has the clients first where ``images`` does. ``product`` multiplies patches ([clients ×] patches ×
    numbers) with kernels ([clients ×] channels × numbers).

    >>> x, layer = torch.randn(2, 3, 8, 8), nn.Conv2d(3, 4, 3, bias=False)
    >>> y = convolve(x.movedim(1, 3), layer.weight, (0, 0), (1, 1), lambda rows, kernels: rows @ kernels.t())
    >>> torch.allclose(y.movedim(3, 1), layer(x), atol=1e-5)
    True
    """
    lead, stacked = images.shape[:-3], images.dim() == 5
    flat = images.flatten(0, 1) if stacked else images
    if any(padding):
        above, beside = padding
        flat = F.pad(flat, (0, 0, beside, beside, above, above))
    kh, kw = weight.shape[-2:]
    high, wide = places(flat.shape[1], kh, stride[0]), places(flat.shape[2], kw, stride[1])
    patches = Patches.apply(flat, (kh, kw, *stride))  # type: ignore[no-untyped-call]
    kernels = weight.movedim(-3, -1).flatten(-3)
    kernels = F.pad(kernels, (0, patches.shape[-1] - kernels.shape[-1]))
    if stacked:
        patches = patches.view(lead[0], -1, patches.shape[-1])
    return product(patches, kernels).view(*lead, high, wide, -1)


class ProductConv2d(nn.Module):
    """``nn.Conv2d`` by patches and one product, with the same parameters under the same names."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self._parameters = layer._parameters
        above, beside = (int(side) for side in layer.padding)
        self.stride, self.padding = (layer.stride[0], layer.stride[1]), (above, beside)

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve images with their channels first, as ``nn.Conv2d`` does."""
        out = convolve(x.permute(0, 2, 3, 1), self.weight, self.padding, self.stride, self._product)
        return out.permute(0, 3, 1, 2)

    def _product(self, patches: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        return patches @ kernels.t() if self.bias is None else torch.addmm(self.bias, patches, kernels.t())


def convolutions_as_products(module: nn.Module) -> nn.Module:
    """Replace a module's plain convolutions (in place) and return it; a convolution itself gives its replacement."""
    if is_plain(module):
        return ProductConv2d(module)
    for name, child in module.named_children():
        setattr(module, name, convolutions_as_products(child))
    return module


def places(size: int, kernel: int, stride: int) -> int:
    """Count the places of a kernel along one side of an image.

    >>> places(32, 5, 1)
    28
    """
    return (size - kernel) // stride + 1


def cut_patches(x: torch.Tensor, size: Size) -> torch.Tensor:
    """Cut images into patches (samples·places × numbers), padded with zeros to a multiple of 16 bytes."""
    (n, high, wide, channels), (kh, kw, sh, sw) = x.shape, size
    rows, numbers = (places(high, kh, sh), places(wide, kw, sw)), kh * kw * channels
    if x.is_cuda and cut_kernel is not None:
        out = x.new_empty((n * rows[0] * rows[1], numbers + -numbers % _ALIGNED))
        cut_kernel(x, out, rows, size)
        return out
    cut = x.unfold(1, kh, sh).unfold(2, kw, sw).permute(0, 1, 2, 4, 5, 3)
    return F.pad(cut.reshape(-1, numbers), (0, -numbers % _ALIGNED))


def add_patches(g: torch.Tensor, shape: torch.Size, size: Size) -> torch.Tensor:
    """Add patches to the places that they were cut from: the gradient of :func:`cut_patches`."""
    (n, high, wide, channels), (kh, kw, sh, sw) = shape, size
    rows = (places(high, kh, sh), places(wide, kw, sw))
    if g.is_cuda and add_kernel is not None:
        back = g.new_empty(shape)
        add_kernel(g.contiguous(), back, rows, size)
        return back
    back = g.new_zeros(shape)
    cut = g[:, : kh * kw * channels].reshape(n, *rows, kh, kw, channels)
    for i in range(kh):
        for j in range(kw):
            back[:, i : i + sh * (rows[0] - 1) + 1 : sh, j : j + sw * (rows[1] - 1) + 1 : sw] += cut[:, :, :, i, j]
    return back


class Patches(torch.autograd.Function):
    """:func:`cut_patches` with its gradient."""

    @staticmethod
    def forward(x: torch.Tensor, size: Size) -> torch.Tensor:
        """Cut images into patches."""
        return cut_patches(x, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Save the images' shape and the patches' size for the backward pass."""
        ctx.shape, ctx.size = inputs[0].shape, inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Add the patches' gradients to the images' gradient."""
        return Patches.Back.apply(gradients[0], ctx.shape, ctx.size), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], x: torch.Tensor, size: Size) -> tuple[torch.Tensor, int]:
        """Cut all clients' images at once, as one larger set of samples."""
        x = x.movedim(dims[0] or 0, 0)
        rows: torch.Tensor = Patches.apply(x.flatten(0, 1), size)  # type: ignore[no-untyped-call]
        return rows.view(len(x), -1, rows.shape[1]), 0

    class Back(torch.autograd.Function):
        """:func:`add_patches`, for stacked clients too."""

        @staticmethod
        def forward(g: torch.Tensor, shape: torch.Size, size: Size) -> torch.Tensor:
            """Add patches to images."""
            return add_patches(g, shape, size)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            """Save nothing: there are no second derivatives."""

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
            """Raise an error: training needs first derivatives only."""
            raise RuntimeError("a convolution's gradient cannot be differentiated here")

        @staticmethod
        def vmap(
            info: Any, dims: tuple[int | None, ...], g: torch.Tensor, shape: torch.Size, size: Size
        ) -> tuple[torch.Tensor, int]:
            """Add all clients' patches at once, as one larger set of samples."""
            g = g.movedim(dims[0] or 0, 0)
            whole = torch.Size((len(g) * shape[0], *shape[1:]))
            return add_patches(g.flatten(0, 1), whole, size).view(len(g), *shape), 0
