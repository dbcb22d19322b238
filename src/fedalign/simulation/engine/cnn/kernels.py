# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""GPU kernels in Triton for patches and pooling, one pass over memory each; None where there is no Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for a CPU comes without it
    triton = None

Pair = tuple[int, int]
_BLOCK = 1024

cut_kernel: Callable[[torch.Tensor, torch.Tensor, Pair, tuple[int, int, int, int]], None] | None = None
add_kernel: Callable[[torch.Tensor, torch.Tensor, Pair, tuple[int, int, int, int]], None] | None = None
pool_kernel: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, Pair], None] | None = None
unpool_kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Pair], None] | None = None

if triton is not None:

    @triton.jit
    def _cut(
        x, out, total, x_n, x_h, x_w, x_c, above, beside,
        C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, K: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Fill a tile of the patches; a number's source address is the sum of an offset by row and one by column."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        n, place = row // (above * beside), (row % (above * beside)).to(tl.int32)
        corner = n * x_n + (place // beside) * (SH * x_h) + (place % beside) * (SW * x_w)
        inside = (k // (C * KW)) * x_h + ((k // C) % KW) * x_w + (k % C) * x_c
        here = (row < total)[:, None] & (k < K)[None, :]
        value = tl.load(x + corner[:, None] + inside[None, :], mask=here & (k < KH * KW * C)[None, :], other=0.0)
        tl.store(out + row[:, None] * K + k[None, :], value, mask=here)

    @triton.jit
    def _add(
        g, back, total, high, wide, above, beside,
        C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, K: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Sum, for every number of the images, the gradients of the patches that contain it."""
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        c = (at % C).to(tl.int32)
        w = ((at // C) % wide).to(tl.int32)
        h = ((at // (C * wide)) % high).to(tl.int32)
        n = at // (C * wide * high)
        sum = tl.zeros((BLOCK,), dtype=back.dtype.element_ty)
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                y, x = (h - i) // SH, (w - j) // SW
                there = (h >= i) & (w >= j) & ((h - i) % SH == 0) & ((w - j) % SW == 0) & (y < above) & (x < beside)
                place = (n * above + y) * beside + x
                sum += tl.load(g + place * K + (i * KW + j) * C + c, mask=there & (at < total), other=0.0)
        tl.store(back + at, sum, mask=at < total)

    @triton.jit
    def _pool(
        x, bias, out, which, total, samples, high, wide, above, beside,
        C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Add the bias, apply ReLU, take each window's maximum and record its place (-1: none above 0)."""
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < total
        c = (at % C).to(tl.int32)
        w = ((at // C) % beside).to(tl.int32)
        h = ((at // (C * beside)) % above).to(tl.int32)
        n = at // (C * beside * above)
        corner = ((n * high + h * KH) * wide + w * KW) * C + c
        best = tl.load(x + corner, mask=inside, other=0.0)
        where = tl.zeros((BLOCK,), dtype=tl.int8)
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                if i + j > 0:
                    value = tl.load(x + corner + (i * wide + j) * C, mask=inside, other=0.0)
                    take = (value > best) | (value != value)
                    best = tl.where(take, value, best)
                    where = tl.where(take, i * KW + j, where).to(tl.int8)
        if BIAS:
            best += tl.load(bias + (n // samples) * C + c, mask=inside, other=0.0)
        off = best <= 0
        tl.store(out + at, tl.where(off, 0.0, best), mask=inside)
        tl.store(which + at, tl.where(off, -1, where).to(tl.int8), mask=inside)

    @triton.jit
    def _unpool(
        g, which, back, total, high, wide, above, beside,
        C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Pass each window's gradient to its maximum, and zero to the others."""
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        c = (at % C).to(tl.int32)
        w = ((at // C) % wide).to(tl.int32)
        h = ((at // (C * wide)) % high).to(tl.int32)
        n = at // (C * wide * high)
        y, x = h // KH, w // KW
        there = (at < total) & (y < above) & (x < beside)
        window = ((n * above + y) * beside + x) * C + c
        chosen = tl.load(which + window, mask=there, other=-1).to(tl.int32) == (h % KH) * KW + w % KW
        tl.store(back + at, tl.load(g + window, mask=there & chosen, other=0.0), mask=at < total)

    def _run_cut(x: torch.Tensor, out: torch.Tensor, rows: Pair, size: tuple[int, int, int, int]) -> None:
        tile, columns = 16, 128
        grid = (triton.cdiv(len(out), tile), triton.cdiv(out.shape[1], columns))
        _cut[grid](x, out, len(out), *x.stride(), *rows, x.shape[3], *size, out.shape[1], ROWS=tile, COLUMNS=columns)

    def _run_add(g: torch.Tensor, back: torch.Tensor, rows: Pair, size: tuple[int, int, int, int]) -> None:
        _, high, wide, channels = back.shape
        grid = (triton.cdiv(back.numel(), _BLOCK),)
        _add[grid](g, back, back.numel(), high, wide, *rows, channels, *size, g.shape[1], BLOCK=_BLOCK)

    def _run_pool(
        x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, which: torch.Tensor, kernel: Pair
    ) -> None:
        samples = len(x) // len(bias) if bias is not None else len(x)
        sizes = (out.numel(), samples, *x.shape[1:3], *out.shape[1:3], x.shape[3], *kernel)
        grid = (triton.cdiv(out.numel(), _BLOCK),)
        _pool[grid](x, bias, out, which, *sizes, BIAS=bias is not None, BLOCK=_BLOCK)

    def _run_unpool(g: torch.Tensor, which: torch.Tensor, back: torch.Tensor, kernel: Pair) -> None:
        sizes = (back.numel(), *back.shape[1:3], *which.shape[1:3], back.shape[3], *kernel)
        _unpool[(triton.cdiv(back.numel(), _BLOCK),)](g, which, back, *sizes, BLOCK=_BLOCK)

    cut_kernel, add_kernel, pool_kernel, unpool_kernel = _run_cut, _run_add, _run_pool, _run_unpool
