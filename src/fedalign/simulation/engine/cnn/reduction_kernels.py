# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""GPU kernels in Triton that reduce over a batch: BatchNorm and softmax; each is None where there is no Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for a CPU comes without it
    triton = None

norm_kernel: Callable[..., None] | None = None
norm_back_kernel: Callable[..., None] | None = None
softmax_kernel: Callable[..., None] | None = None

if triton is not None:

    @triton.jit
    def _norm(
        x, real, weight, bias, mean, var, y, samples, rows, each, eps,
        C: tl.constexpr, AFFINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Normalise some channels of one client over its real rows; ``mean`` and ``var`` start as the running ones."""
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
        """Compute the gradients of :func:`_norm` with respect to its input, weight and bias."""
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
        share = tl.where(count > 1, 1.0 / tl.maximum(count, 1.0), 0.0)  # a batch of one was normalised by constants
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
        """Compute the weighted gradient of one client's cross-entropy; with STEP also subtract it from the bias."""
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

    def _norm_grid(x: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
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

    norm_kernel, norm_back_kernel, softmax_kernel = _run_norm, _run_norm_back, _run_softmax
