"""PyTorch's random functions, answered by hashes while a model trains.

A :class:`HashedDraws` is a mode: inside ``with HashedDraws(key):`` calls of dropout and of random-number functions are
intercepted, wherever in a model they are made. Functions that draw inside PyTorch's compiled code, where nothing can be
intercepted, are refused with a sentence that names them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fedalign.errors import FedalignError
from fedalign.simulation.engine import batchnorm
from fedalign.simulation.engine.draws import Draws, NoDraws
from fedalign.simulation.engine.hashed_functions import answers
from fedalign.simulation.engine.jobs import Data


class HashedDraws(TorchFunctionMode):
    """Draws random numbers by hashing ``key``; without a key, refuses to draw (in evaluation).

    ``vectorised``: the model is called under ``vmap``, which PyTorch's fused attention has no rule for; attention is
    then written out as products.

    >>> layer, x = torch.nn.Dropout(0.5), torch.ones(4, 8)
    >>> with HashedDraws(torch.tensor(3)):
    ...     first = layer(x)
    >>> with HashedDraws(torch.tensor(3)):
    ...     second = layer(x)
    >>> torch.equal(first, second), sorted(set(first.flatten().tolist()))
    (True, [0.0, 2.0])
    """

    def __init__(self, key: torch.Tensor | None, *, vectorised: bool = False) -> None:
        super().__init__()
        self._vectorised = vectorised
        self.attends = False  # whether attention was called
        self.draws = NoDraws() if key is None else Draws(key)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer a random function by hashes, look into functions that call random ones, call all others."""
        kwargs = kwargs or {}
        answer = answers().get(func)
        if func is F.scaled_dot_product_attention:
            self.attends = True
            dropped = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0)
            answer = answer if dropped or self._vectorised else None
        if answer is not None:
            if kwargs.pop("generator", None) is not None or kwargs.pop("out", None) is not None:
                raise FedalignError(
                    f"the model calls {_name(func)} with its own generator= or out=; omit those arguments"
                )
            return answer(self.draws, *args, **kwargs)
        if func in _COMPOSED:
            with self:
                return _body(func)(*args, **kwargs)
        if func in _refused() and _refused()[func](*args, **kwargs):
            raise FedalignError(
                f"the model calls {_name(func)}, whose random numbers are drawn inside PyTorch and could not be "
                "repeated; use nn.Dropout or torch.rand in its place"
            )
        return func(*args, **kwargs)


def hashed_draws(key: torch.Tensor | None) -> AbstractContextManager[object]:
    """Give the mode for one training step; for models that draw nothing (``key`` is None), nothing is intercepted."""
    return contextlib.nullcontext() if key is None else HashedDraws(key)


def tried(template: nn.Module, data: Data) -> HashedDraws:
    """Call a model in training on two samples; the mode then tells how often it drew and whether it attends."""
    module = batchnorm.spare(copy.deepcopy(template).to(data.device)).train()
    x, _ = data.batch(torch.arange(2, device=data.device) % len(data.y))
    mode = HashedDraws(torch.zeros((), dtype=torch.int64, device=data.device))
    with torch.no_grad(), mode:
        module(x)
    return mode


#: Functions written in Python that call random functions.
_COMPOSED = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.gumbel_softmax,
    F.rrelu,
    F.multi_head_attention_forward,
}


@functools.cache
def _body(func: types.FunctionType) -> types.FunctionType:
    """Copy a function of ``torch.nn.functional`` without its first lines' test for a mode, so that its body runs."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**func.__globals__, **dict.fromkeys(names, lambda *_: False)}
    copied = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copied.__kwdefaults__ = func.__kwdefaults__
    return copied


def _name(func: Callable[..., Any]) -> str:
    return f"torch.{getattr(func, '__name__', func)}"


@functools.cache
def _refused() -> Mapping[Callable[..., Any], Callable[..., bool]]:
    """Name functions that draw where nothing can be intercepted, each with a test whether a call of it does."""

    def recurrent(*args: Any, **_: Any) -> bool:
        """Tell whether layers of ``nn.LSTM`` and the like drop out: the arguments end in dropout, train, …"""
        rates = [a for a in args if isinstance(a, float)]
        flags = [a for a in args if isinstance(a, bool)]
        return any(rate > 0 for rate in rates) and len(flags) > 1 and flags[1]

    def always(*_: Any, **__: Any) -> bool:
        return True

    def in_training(*args: Any, **kwargs: Any) -> bool:
        return bool(kwargs.get("training", args[3] if len(args) > 3 else False))

    functions: dict[Callable[..., Any], Callable[..., bool]] = dict.fromkeys(
        (
            torch.multinomial,
            torch.poisson,
            torch.binomial,
            torch.randperm,
            torch.randint_like,
            torch.native_dropout,
            torch.Tensor.multinomial,
            torch.Tensor.random_,
            torch.Tensor.geometric_,
            torch.Tensor.cauchy_,
            torch.Tensor.log_normal_,
            torch._standard_gamma,
            torch._sample_dirichlet,
            F.fractional_max_pool2d,
            F.fractional_max_pool3d,
        ),
        always,
    )
    functions |= dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), recurrent)
    return functions | dict.fromkeys((torch.rrelu, torch.rrelu_), in_training)
