"""Stacked clients of a feed-forward network, with the gradient written out layer by layer.

It uses batched matrix products over the clients in place of autograd: no graph, no gradient buffers for plain SGD, and
the weights of a chunk stay in cache. It handles chains of ``Linear``, ``Flatten`` and elementwise activations, such as
the paper's logistic and fully connected models; other models use ``torch.func`` (``vmapped.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fedalign.simulation.engine.chunk import Step, steps
from fedalign.simulation.engine.cnn.reduction_kernels import softmax_kernel
from fedalign.simulation.engine.cnn.stacked_chain import has_hooks, leaves
from fedalign.simulation.engine.cuda_graphs import GraphCache, Steps
from fedalign.simulation.engine.jobs import Data, TrainJob
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.engine.stacked_optimizer import StackedOptimizer
from fedalign.training.losses import PerSampleLoss, cross_entropy

_TILE = 4096  # the most scores of a client that one program of a kernel can hold
_ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid)
Weights = tuple[torch.Tensor, torch.Tensor | None]


def chain(module: nn.Module, flat_samples: bool = True) -> list[nn.Module] | None:
    """List a model's layers if it is a chain that this module can train, else None.

    Samples that aren't vectors (``flat_samples=False``) must be flattened before anything else.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> [type(layer).__name__ for layer in chain(model) or []]
    ['Linear', 'ReLU', 'Linear']
    """
    layers: list[nn.Module] = []
    parts = [layer for _, layer in leaves(module)]
    if not flat_samples and type(parts[0]) is not nn.Flatten:
        return None
    if has_hooks(module):
        return None
    for leaf in parts:
        if type(leaf) is nn.Linear or type(leaf) in _ACTIVATIONS:
            layers.append(leaf)
        elif not (type(leaf) is nn.Flatten and leaf.start_dim == 1 and leaf.end_dim == -1):
            return None
    parameters = list(module.parameters())
    owned = [p for layer in layers for p in layer.parameters(recurse=False)]
    simple = len(owned) == len(parameters) == len({id(p) for p in owned}) and all(p.requires_grad for p in parameters)
    framed = bool(layers) and isinstance(layers[0], nn.Linear) and isinstance(layers[-1], nn.Linear)
    return layers if simple and framed and not list(module.buffers()) else None


class LinearChainStepper:
    """Trains and evaluates stacked clients of a chain of layers."""

    def __init__(self, layers: Sequence[nn.Module], layout: Layout, loss: PerSampleLoss, data: Data) -> None:
        self._layers, self._layout, self._loss, self._data = layers, layout, loss, data
        self._graphs = None
        if data.device.type == "cuda" and loss is cross_entropy:
            self._graphs = GraphCache(self._graphed_step, layout, data)

    def forward(self, models: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Compute outputs of stacked models on stacked samples."""
        _, scores = self._forward(self._weights(models, copy=False), _flat(x))
        return scores.transpose(1, 2)

    def train(self, models: torch.Tensor, jobs: Sequence[TrainJob]) -> torch.Tensor:
        """Do every job's local work, from the stacked flat ``models``; give the stacked results."""
        if self._graphs is not None and (trained := self._graphs.train(models, jobs)) is not None:
            return trained
        local = jobs[0].local
        twin = len(jobs) == 1 or jobs[0].steps > jobs[1].steps
        if twin:
            # The library computes a single product differently than a batch of products, and rounds differently. So a
            # single client is trained twice, side by side: its bits must not depend on how many clients are stacked.
            jobs, models = [jobs[0], *jobs], torch.cat([models[:1], models])
        weights = self._weights(models, copy=True)
        tensors = [t for pair in weights for t in pair if t is not None]
        optimizer = StackedOptimizer(local, tensors, jobs[0].only)
        optimizer.prepare(jobs)
        for step in steps(jobs, self._data):
            n = len(step.x)
            active = [(w[:n], b[:n] if b is not None else None) for w, b in weights]
            inputs, scores = self._forward(active, _flat(step.x))
            delta = self._output_gradient(scores, step)
            if optimizer.plain and isinstance(step.rate, float):
                self._backward(active, inputs, delta, -step.rate)
            else:
                optimizer.step(self._backward(active, inputs, delta, None), step.rate)
        return self._layout.join(tensors)[1 if twin else 0 :]

    def _graphed_step(self, tensors: Sequence[torch.Tensor], optimizer: StackedOptimizer, steps: Steps, k: int) -> None:
        """Do one step on fixed buffers. For plain SGD the rate is folded into the samples' weights."""
        weights = self._pairs(tensors)
        inputs, scores = self._forward(weights, _flat(steps.x[k]))
        weight = (steps.scaled if optimizer.plain else steps.weights)[k]
        last = weights[-1][1] if optimizer.plain else None
        delta, bias_done = softmax_gradient(scores, steps.y[k], weight, last)
        if optimizer.plain:
            self._backward([*weights[:-1], (weights[-1][0], None)] if bias_done else weights, inputs, delta, -1.0)
        else:
            optimizer.step(self._backward(weights, inputs, delta, None), steps.rates[k])

    def _weights(self, models: torch.Tensor, copy: bool) -> list[Weights]:
        return self._pairs([p.clone() if copy else p for _, p, _ in self._layout.pieces(models)])

    def _pairs(self, tensors: Sequence[torch.Tensor]) -> list[Weights]:
        pieces = iter(tensors)
        return [
            (next(pieces), next(pieces) if layer.bias is not None else None)
            for layer in self._layers
            if isinstance(layer, nn.Linear)
        ]

    def _forward(self, weights: Sequence[Weights], x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Give every layer's input (clients × samples × features) and the scores (clients × classes × samples).

        With the classes before the samples, the softmax runs along whole vectors.
        """
        inputs, linear = [x], iter(weights)
        for layer in self._layers[:-1]:
            last = inputs[-1]
            if isinstance(layer, nn.Linear):
                w, b = next(linear)
                wt = w.transpose(1, 2)
                inputs.append(torch.bmm(last, wt) if b is None else torch.baddbmm(b.unsqueeze(1), last, wt))
            elif isinstance(layer, nn.ReLU):
                inputs.append(last.relu_())  # in place: the backward pass needs only the activation's output
            else:
                inputs.append(last.tanh_() if isinstance(layer, nn.Tanh) else last.sigmoid_())
        w, b = next(linear)
        xt = inputs[-1].transpose(1, 2)
        return inputs, torch.bmm(w, xt) if b is None else torch.baddbmm(b.unsqueeze(2), w, xt)

    def _output_gradient(self, scores: torch.Tensor, step: Step) -> torch.Tensor:
        """Differentiate the clients' mean losses with respect to the scores."""
        if self._loss is cross_entropy:
            # torch.softmax over a middle dimension rounds differently at the borders between threads.
            delta = (scores - scores.amax(1, keepdim=True)).exp_()
            delta.div_(delta.sum(1, keepdim=True))
            labels = step.y.unsqueeze(1)
            delta.scatter_add_(1, labels, delta.new_full((), -1.0).expand(labels.shape))
        else:
            leaf = scores.detach().requires_grad_()
            with torch.enable_grad():
                total = self._loss(leaf.transpose(1, 2).flatten(0, 1), step.y.flatten(0, 1)).sum()
            (delta,) = torch.autograd.grad(total, leaf)
        return delta.mul_(1 / step.width) if step.weights is None else delta.mul_(step.weights.unsqueeze(1))

    def _backward(
        self,
        weights: Sequence[Weights],
        inputs: Sequence[torch.Tensor],
        delta: torch.Tensor,
        move: float | None,
    ) -> list[torch.Tensor]:
        """Go backward through the layers: add ``move·gradient`` to the weights; without ``move``, return gradients."""
        gradients: list[torch.Tensor] = []
        linear = len(weights)
        delta = delta.transpose(1, 2)  # clients × samples × features from here on
        for index in reversed(range(len(self._layers))):
            layer, before = self._layers[index], inputs[index]
            if not isinstance(layer, nn.Linear):
                after = inputs[index + 1]
                if isinstance(layer, nn.ReLU):
                    torch.ops.aten.threshold_backward.grad_input(delta, after, 0, grad_input=delta)
                else:
                    delta = delta.mul_(1 - after.square() if isinstance(layer, nn.Tanh) else after * (1 - after))
                continue
            linear -= 1
            w, b = weights[linear]
            earlier = torch.bmm(delta, w) if index else delta
            if move is None:
                gradients[:0] = [
                    torch.bmm(delta.transpose(1, 2), before),
                    *([delta.sum(1)] if b is not None else []),
                ]
            else:
                w.baddbmm_(delta.transpose(1, 2), before, alpha=move)
                if b is not None:
                    b.add_(delta.sum(1), alpha=move)
            delta = earlier
        return gradients


def softmax_gradient(
    scores: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, bool]:
    """Give ``weights·(softmax − truth)`` for scores (clients × classes × samples).

    On a GPU that is one kernel, which can also subtract the gradient from the last layer's ``bias``; the second result
    says whether it did.
    """
    if scores.is_cuda and softmax_kernel is not None and scores.shape[1] * scores.shape[2] <= _TILE:
        delta = torch.empty_like(scores)
        softmax_kernel(scores, y, weights, bias, delta)
        return delta, bias is not None
    delta = torch.softmax(scores, 1).mul_(weights.unsqueeze(1))
    return delta.scatter_add_(1, y.unsqueeze(1), -weights.unsqueeze(1)), False


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(*x.shape[:2], -1)
