"""A chain of layers for stacked clients, written with the clients as a dimension of their own.

``torch.func.vmap`` can stack any module, but its convolutions with weights per client are slow. Here a convolution is
one batched product (``convolution.py``), and what PyTorch does between the products in many passes over large
activations is done in few (``kernels.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fedalign.simulation.engine.cnn.convolution import convolve, is_plain
from fedalign.simulation.engine.cnn.kernels import Pair
from fedalign.simulation.engine.cnn.normalisation import StackedNorm, running_after
from fedalign.simulation.engine.cnn.pooling import ReluPool, poolable
from fedalign.simulation.engine.draws import Draws, NoDraws
from fedalign.training.losses import PerSampleLoss

Tensors = dict[str, torch.Tensor]
_ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid)
_DROPOUTS = (nn.Dropout, nn.Dropout2d)


def leaves(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """List a model's layers with their names, if it is a ``Sequential`` (of ``Sequential``); else the model itself."""
    if type(module) is nn.Sequential and len(module):
        return [
            leaf
            for name, child in module._modules.items()
            if child is not None
            for leaf in leaves(child, f"{prefix}{name}.")
        ]
    return [(prefix, module)]


def has_hooks(module: nn.Module) -> bool:
    """Tell whether calling a module does more than its ``forward``."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(part, name) for part in module.modules() for name in hooks)


class _Linear(torch.autograd.Function):
    """A batched product with stacked weights (clients × out × in); their gradient has the weights' memory layout."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        (g,) = gradients
        x, weight = ctx.saved_tensors
        return torch.bmm(g, weight) if ctx.needs_input_grad[0] else None, torch.bmm(g.transpose(1, 2), x)


class StackedChain:
    """The layers of a chain, applied to stacked samples with stacked weights (clients × samples × …)."""

    def __init__(self, template: nn.Module, loss: PerSampleLoss) -> None:
        self._layers, self._loss = leaves(template), loss

    @staticmethod
    def serves(template: nn.Module) -> bool:
        """Tell whether a model is a chain that fits here: layers on images, a flattening, layers on vectors."""
        layers = [layer for _, layer in leaves(template)]
        flat = next((i for i, layer in enumerate(layers) if type(layer) is nn.Flatten), len(layers))
        before, after = layers[:flat], layers[flat + 1 :]
        owned = [id(p) for layer in layers for p in layer.parameters()]
        return (
            not has_hooks(template)
            and any(type(layer) is nn.Conv2d for layer in before)
            and flat < len(layers)
            and all(_on_images(layer) for layer in before)
            and all(_on_vectors(layer) for layer in after)
            and len(owned) == len(set(owned))
        )

    def gradient(
        self,
        parameters: Tensors,
        rest: Tensors,
        x: torch.Tensor,
        y: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor | None = None,
    ) -> tuple[Tensors, Tensors]:
        """Differentiate every client's weighted loss; give the gradients and the new BatchNorm statistics.

        ``keys`` has each client's key for dropout masks, where the chain has such layers.
        """
        leaf = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        statistics: Tensors = {}
        with torch.enable_grad():
            draws = NoDraws() if keys is None else Draws(keys)
            outputs = self._forward(leaf | rest, x, (weights > 0).to(weights.dtype), statistics, draws)
            objective = (self._loss(outputs.flatten(0, 1), y.flatten(0, 1)) * weights.flatten(0, 1)).sum()
        gradients = torch.autograd.grad(objective, list(leaf.values()))
        return dict(zip(leaf, gradients, strict=True)), {name: t.detach() for name, t in statistics.items()}

    def _forward(
        self, tensors: Tensors, x: torch.Tensor, real: torch.Tensor, statistics: Tensors, draws: Draws
    ) -> torch.Tensor:
        images = x.dim() == 5
        if images:
            x = x.permute(0, 1, 3, 4, 2)  # channels innermost, up to the flattening
        done = 0
        while done < len(self._layers):
            name, layer = self._layers[done]
            done += 1
            mine = {key: tensors[name + key] for key in (*layer._parameters, *layer._buffers) if name + key in tensors}
            window = self._pooled_after(done)
            if isinstance(layer, nn.Conv2d):
                above, beside = (int(side) for side in layer.padding)
                stride = (layer.stride[0], layer.stride[1])
                x = convolve(x, mine["weight"], (above, beside), stride, _Linear.apply)
                if window is not None:
                    x, done = _relu_pool(x, mine.get("bias"), window), done + 2
                elif "bias" in mine:
                    x = x + mine["bias"].view(len(x), 1, 1, 1, -1)
            elif isinstance(layer, nn.MaxPool2d):
                flat = x.flatten(0, 1).permute(0, 3, 1, 2)
                x = layer(flat).permute(0, 2, 3, 1).unflatten(0, x.shape[:2])
            elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
                x, new = _normalise(layer, mine, x, real)
                statistics |= {name + key: t for key, t in new.items()}
                if window is not None:
                    x, done = _relu_pool(x, None, window), done + 2
            elif isinstance(layer, nn.Flatten):
                x = x.permute(0, 1, 4, 2, 3) if images else x
                x, images = x.flatten(2), False
            elif isinstance(layer, nn.Linear):
                x = _Linear.apply(x, mine["weight"])  # type: ignore[no-untyped-call]
                x = x + mine["bias"].unsqueeze(1) if "bias" in mine else x
            elif isinstance(layer, _DROPOUTS):
                x = _drop_out(layer, x, draws, images)
            else:
                x = layer(x)
        return x

    def _pooled_after(self, place: int) -> Pair | None:
        """Give the windows' size if a ReLU and a pooling follow that one kernel can do together."""
        following = [layer for _, layer in self._layers[place : place + 2]]
        return poolable(*following) if len(following) == 2 else None


def _on_images(layer: nn.Module) -> bool:
    if is_plain(layer):
        return True
    if type(layer) is nn.MaxPool2d:
        return not layer.return_indices
    plain = type(layer) in (*_ACTIVATIONS, *_DROPOUTS)
    return plain or (type(layer) is nn.BatchNorm2d and layer.track_running_stats)


def _on_vectors(layer: nn.Module) -> bool:
    normal = type(layer) is nn.BatchNorm1d and layer.track_running_stats
    return normal or type(layer) in (nn.Linear, nn.Dropout, *_ACTIVATIONS)


def _drop_out(layer: nn.Dropout | nn.Dropout2d, x: torch.Tensor, draws: Draws, images: bool) -> torch.Tensor:
    """Drop out numbers or whole channels; masks are drawn with the channels first, as the model's layers draw them."""
    if layer.p in (0, 1):
        return x if layer.p == 0 else x * 0
    if not images:
        return x * draws.scaled_mask(layer.p, x.shape[1:], x.dtype)
    samples, high, wide, channels = x.shape[1:]
    shape = (samples, channels, 1, 1) if isinstance(layer, nn.Dropout2d) else (samples, channels, high, wide)
    return x * draws.scaled_mask(layer.p, shape, x.dtype).permute(0, 1, 3, 4, 2)


def _relu_pool(x: torch.Tensor, bias: torch.Tensor | None, window: Pair) -> torch.Tensor:
    pooled: torch.Tensor = ReluPool.apply(x.flatten(0, 1), bias, window)  # type: ignore[no-untyped-call]
    return pooled.view(*x.shape[:2], *pooled.shape[1:])


def _normalise(
    layer: nn.BatchNorm1d | nn.BatchNorm2d, mine: Tensors, x: torch.Tensor, real: torch.Tensor
) -> tuple[torch.Tensor, Tensors]:
    """Normalise over each client's real samples, with channels innermost; give the result and the new statistics."""
    rows = x.flatten(2, -2).flatten(1, 2) if x.dim() > 3 else x
    running = (mine["running_mean"], mine["running_var"])
    y, mean, var = StackedNorm.apply(rows, real, mine.get("weight"), mine.get("bias"), running, layer.eps)  # type: ignore[no-untyped-call]
    count = (real.sum(1) * (rows.shape[1] // real.shape[1])).unsqueeze(1)
    return y.view(x.shape), running_after(mean, var, count, mine, layer.momentum)
