"""Cutting images into patches and adding patches back: what makes a convolution a matrix product.

Images lie with their channels innermost (samples × height × width × channels), so that both move whole runs of memory.
On a GPU each is one pass, written in Triton, which comes with PyTorch's CUDA builds; elsewhere it is plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fedalign.simulation.engine.cnn.kernels import add_kernel, cut_kernel

_ALIGNED = 4  # numbers: matrix units read 16 bytes at a time
Size = tuple[int, int, int, int]  # the kernel's height and width, the strides down and across


def places(size: int, kernel: int, stride: int) -> int:
    """Count the places of a kernel along one side of an image.

    >>> places(32, 5, 1)
    28
    """
    return (size - kernel) // stride + 1


def cut_patches(x: torch.Tensor, size: Size) -> torch.Tensor:
    """Cut images into patches (samples·places × numbers); a patch is filled up with zeros to whole 16 bytes."""
    (n, high, wide, channels), (kh, kw, sh, sw) = x.shape, size
    rows, numbers = (places(high, kh, sh), places(wide, kw, sw)), kh * kw * channels
    if x.is_cuda and cut_kernel is not None:
        out = x.new_empty((n * rows[0] * rows[1], numbers + -numbers % _ALIGNED))
        cut_kernel(x, out, rows, size)
        return out
    cut = x.unfold(1, kh, sh).unfold(2, kw, sw).permute(0, 1, 2, 4, 5, 3)
    return F.pad(cut.reshape(-1, numbers), (0, -numbers % _ALIGNED))


def add_patches(g: torch.Tensor, shape: torch.Size, size: Size) -> torch.Tensor:
    """Add patches back to where they were cut: the gradient of :func:`cut_patches`."""
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
        """Cut."""
        return cut_patches(x, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Remember what was cut."""
        ctx.shape, ctx.size = inputs[0].shape, inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Add back."""
        return Patches.Back.apply(gradients[0], ctx.shape, ctx.size), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], x: torch.Tensor, size: Size) -> tuple[torch.Tensor, int]:
        """Cut all clients' images at once: they are more samples."""
        x = x.movedim(dims[0] or 0, 0)
        rows: torch.Tensor = Patches.apply(x.flatten(0, 1), size)  # type: ignore[no-untyped-call]
        return rows.view(len(x), -1, rows.shape[1]), 0

    class Back(torch.autograd.Function):
        """:func:`add_patches`, for stacked clients too."""

        @staticmethod
        def forward(g: torch.Tensor, shape: torch.Size, size: Size) -> torch.Tensor:
            """Add back."""
            return add_patches(g, shape, size)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            """Nothing is kept: nobody differentiates twice here."""

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
            """Refuse: training needs first derivatives alone."""
            raise RuntimeError("a convolution's gradient cannot be differentiated here")

        @staticmethod
        def vmap(
            info: Any, dims: tuple[int | None, ...], g: torch.Tensor, shape: torch.Size, size: Size
        ) -> tuple[torch.Tensor, int]:
            """Add all clients' patches back at once."""
            g = g.movedim(dims[0] or 0, 0)
            whole = torch.Size((len(g) * shape[0], *shape[1:]))
            return add_patches(g.flatten(0, 1), whole, size).view(len(g), *shape), 0
