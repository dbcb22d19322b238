"""Hashed versions of PyTorch's random functions, with the same arguments: what a model gets while it trains."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fedalign.simulation.engine.draws import Draws

_ALPHA = 1.7580993408473766  # of SELU: what alpha dropout sets dropped numbers to, negated


def _dropout(
    draws: Draws, input: torch.Tensor, p: float = 0.5, train: bool = True, *, features: bool = False
) -> torch.Tensor:
    if not train or p == 0 or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    return input * draws.scaled_mask(p, _places(input, features), input.dtype)


def _alpha_dropout(
    draws: Draws, input: torch.Tensor, p: float = 0.5, train: bool = False, *, features: bool = False
) -> torch.Tensor:
    if not train or p == 0 or p == 1 or input.numel() == 0:
        return _dropout(draws, input, p, train)
    kept = draws.kept(p, _places(input, features)).to(input.dtype)
    a = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    return input * (kept * a) + (kept - 1).mul_(_ALPHA * a).add_(_ALPHA * a * p)


def _places(input: torch.Tensor, features: bool) -> Sequence[int]:
    """Give a mask's shape: one number for each of the input's, or for each sample and channel."""
    return (*input.shape[:2], *(1,) * (input.dim() - 2)) if features else input.shape


def _in_place(answer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def write(draws: Draws, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = answer(draws, input, *args, **kwargs)
        return output if output is input else input.copy_(output)

    return write


def _attention(
    draws: Draws,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Give ``F.scaled_dot_product_attention``, written out, so that its weights can be dropped out."""
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return _dropout(draws, scores.softmax(-1), dropout_p) @ value


def _fresh(kind: str, draws: Draws, *size: Any, **options: Any) -> torch.Tensor:
    """Answer ``torch.rand`` and ``torch.randn``."""
    shape = options.pop("size", size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    dtype = options.get("dtype") or torch.get_default_dtype()
    drawn: torch.Tensor = getattr(draws, kind)(tuple(shape), dtype)
    device = options.get("device")
    return drawn.to(device if device is not None else torch.get_default_device())


def _like(kind: str, draws: Draws, input: torch.Tensor, **options: Any) -> torch.Tensor:
    """Answer ``torch.rand_like`` and ``torch.randn_like``."""
    options["device"] = options.get("device") or input.device
    return _fresh(kind, draws, tuple(input.shape), **{**options, "dtype": options.get("dtype") or input.dtype})


def _integers(draws: Draws, low: int, *rest: Any, size: Any = None, **options: Any) -> torch.Tensor:
    """Answer ``torch.randint(low=0, high, size)``."""
    numbers = [low, *rest]
    if size is None:
        size = numbers.pop()
    high = options.pop("high", None)
    if high is None:
        high = numbers.pop()
    least = numbers[0] if numbers else 0
    drawn: torch.Tensor = draws.bits(tuple(size)) % (high - least) + least
    device = options.get("device")
    return drawn.to(device if device is not None else torch.get_default_device(), options.get("dtype") or torch.int64)


def _bernoulli(draws: Draws, input: torch.Tensor, p: Any = None) -> torch.Tensor:
    """Answer ``torch.bernoulli(input)`` and ``input.bernoulli(p)``: 1 with probability ``p``."""
    chance = input if p is None else p
    kept = draws.uniform(tuple(input.shape), torch.float64) < chance
    return kept.to(input.dtype)


def _bernoulli_in_place(draws: Draws, input: torch.Tensor, p: Any = 0.5) -> torch.Tensor:
    return input.copy_(_bernoulli(draws, input, p))


def _uniform_in_place(draws: Draws, input: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return input.copy_(draws.uniform(tuple(input.shape), input.dtype).mul_(high - low).add_(low))


def _normal_in_place(draws: Draws, input: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return input.copy_(draws.normal(tuple(input.shape), input.dtype).mul_(std).add_(mean))


def _normal(draws: Draws, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> torch.Tensor:
    """Answer ``torch.normal``: of tensors of means and standard deviations, or of two numbers and a size."""
    if size is not None:
        return _fresh("normal", draws, tuple(size), **options).mul_(std).add_(mean)
    tensors = [t for t in (mean, std) if isinstance(t, torch.Tensor)]
    shape = torch.broadcast_tensors(*tensors)[0].shape  # type: ignore[no-untyped-call]
    drawn: torch.Tensor = draws.normal(tuple(shape), tensors[0].dtype) * std + mean
    return drawn


def _exponential_in_place(draws: Draws, input: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
    drawn = -torch.log1p(-draws.uniform(tuple(input.shape), torch.float64)) / lambd
    return input.copy_(drawn.clamp(min=2.0**-54))  # as PyTorch's, never zero: its logarithm is taken


@functools.cache
def answers() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Give the hashed version of each random function; it takes a :class:`Draws` before the function's arguments."""
    feature, alpha = functools.partial(_dropout, features=True), functools.partial(_alpha_dropout, features=True)
    return {
        torch.dropout: _dropout,
        torch.dropout_: _in_place(_dropout),
        torch.feature_dropout: feature,
        torch.feature_dropout_: _in_place(feature),
        torch.alpha_dropout: _alpha_dropout,
        torch.alpha_dropout_: _in_place(_alpha_dropout),
        torch.feature_alpha_dropout: alpha,
        torch.feature_alpha_dropout_: _in_place(alpha),
        F.scaled_dot_product_attention: _attention,
        torch.rand: functools.partial(_fresh, "uniform"),
        torch.randn: functools.partial(_fresh, "normal"),
        torch.rand_like: functools.partial(_like, "uniform"),
        torch.randn_like: functools.partial(_like, "normal"),
        torch.randint: _integers,
        torch.normal: _normal,
        torch.bernoulli: _bernoulli,
        torch.Tensor.bernoulli: _bernoulli,
        torch.Tensor.bernoulli_: _bernoulli_in_place,
        torch.Tensor.uniform_: _uniform_in_place,
        torch.Tensor.normal_: _normal_in_place,
        torch.Tensor.exponential_: _exponential_in_place,
    }
