# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""GPU kernels in Triton for what PyTorch does in several passes over memory. None where there is no Triton."""

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
norm_kernel: Callable[..., None] | None = None
norm_back_kernel: Callable[..., None] | None = None
softmax_kernel: Callable[..., None] | None = None

if triton is not None:

    @triton.jit
    def _cut(
        x, out, total, x_n, x_h, x_w, x_c, above, beside,
        C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, K: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Fill a tile of the patches; where a number comes from is a sum of what its row and its column say."""
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
        """Collect, for every number of the images, what the patches that hold it say."""
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
        """Add the bias, cut off below zero, take each window's largest and remember where it was (-1: none above 0)."""
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
        """Give each window's gradient to its largest number, and nothing to the others."""
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

    @triton.jit
    def _norm(
        x, real, weight, bias, mean, var, y, samples, rows, each, eps,
        C: tl.constexpr, AFFINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Normalise some channels of one client over its real rows; ``mean`` and ``var`` come in as running ones."""
        client = tl.program_id(0).to(tl.int64)
        c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        some = c < C
        base = client * rows * C
        count = 0.0
        total = tl.zeros((COLUMNS,), dtype=x.dtype.element_ty)
        for start in range(0, rows, ROWS):
            m = start + tl.arange(0, ROWS)
            r = tl.load(real + client * samples + m // each, mask=m < rows, other=0.0)
            v = tl.load(x + base + m[:, None] * C + c[None, :], mask=(m < rows)[:, None] & some[None, :], other=0.0)
            total += tl.sum(v * r[:, None], 0)
            count += tl.sum(r, 0)
        mu = total / tl.maximum(count, 1.0)
        total = tl.zeros((COLUMNS,), dtype=x.dtype.element_ty)
        for start in range(0, rows, ROWS):
            m = start + tl.arange(0, ROWS)
            r = tl.load(real + client * samples + m // each, mask=m < rows, other=0.0)
            v = tl.load(x + base + m[:, None] * C + c[None, :], mask=(m < rows)[:, None] & some[None, :], other=0.0)
            total += tl.sum((v - mu[None, :]) * (v - mu[None, :]) * r[:, None], 0)
        enough = count > 1
        mu = tl.where(enough, mu, tl.load(mean + client * C + c, mask=some, other=0.0))
        sigma2 = tl.where(enough, total / tl.maximum(count, 1.0), tl.load(var + client * C + c, mask=some, other=1.0))
        tl.store(mean + client * C + c, mu, mask=some)
        tl.store(var + client * C + c, sigma2, mask=some)
        scale = 1.0 / tl.sqrt(sigma2 + eps)
        shift = tl.zeros((COLUMNS,), dtype=x.dtype.element_ty)
        if AFFINE:
            scale *= tl.load(weight + client * C + c, mask=some, other=0.0)
            shift += tl.load(bias + client * C + c, mask=some, other=0.0)
        for start in range(0, rows, ROWS):
            m = start + tl.arange(0, ROWS)
            at = base + m[:, None] * C + c[None, :]
            here = (m < rows)[:, None] & some[None, :]
            v = tl.load(x + at, mask=here, other=0.0)
            tl.store(y + at, (v - mu[None, :]) * scale[None, :] + shift[None, :], mask=here)

    @triton.jit
    def _norm_back(
        x, g, real, weight, mean, var, dx, dw, db, samples, rows, each, eps,
        C: tl.constexpr, AFFINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Differentiate :func:`_norm`."""
        client = tl.program_id(0).to(tl.int64)
        c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        some = c < C
        base = client * rows * C
        mu = tl.load(mean + client * C + c, mask=some, other=0.0)
        inverse = 1.0 / tl.sqrt(tl.load(var + client * C + c, mask=some, other=1.0) + eps)
        count = 0.0
        of_g = tl.zeros((COLUMNS,), dtype=x.dtype.element_ty)
        of_gx = tl.zeros((COLUMNS,), dtype=x.dtype.element_ty)
        for start in range(0, rows, ROWS):
            m = start + tl.arange(0, ROWS)
            at = base + m[:, None] * C + c[None, :]
            here = (m < rows)[:, None] & some[None, :]
            r = tl.load(real + client * samples + m // each, mask=m < rows, other=0.0)
            gr = tl.load(g + at, mask=here, other=0.0) * r[:, None]
            of_g += tl.sum(gr, 0)
            of_gx += tl.sum(gr * (tl.load(x + at, mask=here, other=0.0) - mu[None, :]) * inverse[None, :], 0)
            count += tl.sum(r, 0)
        tl.store(db + client * C + c, of_g, mask=some)
        tl.store(dw + client * C + c, of_gx, mask=some)
        scale = inverse
        if AFFINE:
            scale *= tl.load(weight + client * C + c, mask=some, other=0.0)
        share = tl.where(count > 1, 1.0 / tl.maximum(count, 1.0), 0.0)  # of a batch of one, nothing but g comes back
        for start in range(0, rows, ROWS):
            m = start + tl.arange(0, ROWS)
            at = base + m[:, None] * C + c[None, :]
            here = (m < rows)[:, None] & some[None, :]
            r = tl.load(real + client * samples + m // each, mask=m < rows, other=0.0)
            xhat = (tl.load(x + at, mask=here, other=0.0) - mu[None, :]) * inverse[None, :]
            out = tl.load(g + at, mask=here, other=0.0) - (of_g[None, :] + xhat * of_gx[None, :]) * share
            tl.store(dx + at, out * scale[None, :] * r[:, None], mask=here)

    @triton.jit
    def _softmax(
        scores, y, weights, bias, delta, classes, samples, s_k, s_n,
        STEP: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    ):  # fmt: skip
        """Weigh softmax minus truth of one client's batch; with STEP also take its sum off the last layer's bias."""
        client = tl.program_id(0).to(tl.int64)
        k, n = tl.arange(0, K), tl.arange(0, N)
        here = (k < classes)[:, None] & (n < samples)[None, :]
        at = client * classes * samples + k[:, None] * s_k + n[None, :] * s_n
        v = tl.load(scores + at, mask=here, other=-float("inf"))
        v = tl.where((n < samples)[None, :], v, 0.0)
        e = tl.exp(v - tl.max(v, 0)[None, :])
        e = e / tl.sum(e, 0)[None, :]
        truth = tl.load(y + client * samples + n, mask=n < samples, other=-1)
        weight = tl.load(weights + client * samples + n, mask=n < samples, other=0.0)
        d = (e - tl.where(k[:, None] == truth[None, :], 1.0, 0.0)) * weight[None, :]
        tl.store(delta + at, d, mask=here)
        if STEP:
            where = bias + client * classes + k
            left = tl.load(where, mask=k < classes, other=0.0) - tl.sum(tl.where(here, d, 0.0), 1)
            tl.store(where, left, mask=k < classes)

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

    def _norm_grid(x: torch.Tensor) -> tuple[Pair, dict[str, int]]:
        columns = min(32, triton.next_power_of_2(x.shape[2]))
        return (len(x), triton.cdiv(x.shape[2], columns)), {"ROWS": 4096 // columns, "COLUMNS": columns}

    def _run_norm(
        x: torch.Tensor,
        real: torch.Tensor,
        affine: tuple[torch.Tensor, torch.Tensor] | None,
        statistics: tuple[torch.Tensor, torch.Tensor],
        y: torch.Tensor,
        eps: float,
    ) -> None:
        grid, tile = _norm_grid(x)
        sizes = (real.shape[1], x.shape[1], x.shape[1] // real.shape[1], eps, x.shape[2])
        weight, bias = affine or (x, x)
        _norm[grid](x, real, weight, bias, *statistics, y, *sizes, AFFINE=affine is not None, **tile)

    def _run_norm_back(
        x: torch.Tensor,
        g: torch.Tensor,
        real: torch.Tensor,
        weight: torch.Tensor | None,
        statistics: tuple[torch.Tensor, torch.Tensor],
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        eps: float,
    ) -> None:
        grid, tile = _norm_grid(x)
        sizes = (real.shape[1], x.shape[1], x.shape[1] // real.shape[1], eps, x.shape[2])
        scale = x if weight is None else weight
        _norm_back[grid](x, g, real, scale, *statistics, *gradients, *sizes, AFFINE=weight is not None, **tile)

    def _run_softmax(
        scores: torch.Tensor,
        y: torch.Tensor,
        weights: torch.Tensor,
        bias: torch.Tensor | None,
        delta: torch.Tensor,
    ) -> None:
        clients, classes, samples = scores.shape
        tile = {"K": triton.next_power_of_2(classes), "N": triton.next_power_of_2(samples)}
        last = scores if bias is None else bias
        _softmax[(clients,)](
            scores, y, weights, last, delta, classes, samples, *scores.stride()[1:], STEP=bias is not None, **tile
        )

    cut_kernel, add_kernel, pool_kernel, unpool_kernel = _run_cut, _run_add, _run_pool, _run_unpool
    norm_kernel, norm_back_kernel, softmax_kernel = _run_norm, _run_norm_back, _run_softmax
