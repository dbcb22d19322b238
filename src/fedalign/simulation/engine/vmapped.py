"""Stacked clients of any module: ``torch.func.vmap`` over clients, or one client at a time in several threads.

A convolution with separate weights for every client is a grouped convolution, which is slow on CPUs: there, one client
per thread is faster and keeps its weights in the core's cache.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedalign.simulation.engine import batchnorm
from fedalign.simulation.engine.chunk import Step, steps
from fedalign.simulation.engine.cnn.convolution import convolutions_as_products
from fedalign.simulation.engine.cnn.stacked_chain import StackedChain
from fedalign.simulation.engine.cuda_graphs import GraphCache, Steps
from fedalign.simulation.engine.jobs import Data, TrainJob
from fedalign.simulation.engine.layout import Layout
from fedalign.simulation.engine.random_functions import HashedDraws, hashed_draws, tried
from fedalign.simulation.engine.stacked_optimizer import StackedOptimizer
from fedalign.training.losses import PerSampleLoss

Tensors = dict[str, torch.Tensor]


class VmapStepper:
    """Trains and evaluates stacked clients of any module."""

    def __init__(self, template: nn.Module, layout: Layout, loss: PerSampleLoss, data: Data) -> None:
        self._layout, self._loss, self._data = layout, loss, data
        self._template = copy.deepcopy(template).to(data.device)
        self._padding = batchnorm.Padding()
        self._module = batchnorm.mask(copy.deepcopy(self._template), self._padding)
        if data.device.type == "cuda":
            self._module = convolutions_as_products(self._module)
        self._own = threading.local()  # a copy of the module for each thread that trains one client at a time
        trial = tried(template, data)
        self._draws, self._attends = trial.draws.count > 0, trial.attends
        self._graphs = None
        if data.device.type == "cuda":
            self._graphs = GraphCache(self._graphed_step, layout, data, draws=self._draws)
        self._gradient: Callable[..., tuple[Tensors, Tensors]] = vmap(
            grad(self._objective, has_aux=True), in_dims=(0, 0, 0, 0, 0, 0 if self._draws else None)
        )
        if data.device.type == "cuda" and StackedChain.serves(template):
            self._gradient = StackedChain(template, loss).gradient

    def forward(self, models: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Compute outputs of stacked models on stacked samples."""
        self._module.eval()
        if len(models) == 1:
            one = x[0]
            if one.dim() == 4 and one.device.type == "cpu":
                one = one.contiguous(
                    memory_format=torch.channels_last
                )  # nearly twice as fast for convolutions on a CPU
            return self._call(self._layout.unflatten(models[0]), one).unsqueeze(0)
        stacked: torch.Tensor = vmap(self._call_stacked)(self._layout.unflatten(models), x)
        return stacked

    def _call(self, tensors: Tensors, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = functional_call(self._module, tensors, (x,))
        return outputs

    def _call_stacked(self, tensors: Tensors, x: torch.Tensor, key: torch.Tensor | None = None) -> torch.Tensor:
        """Call the model under ``vmap``, with a client's key in training; models that don't need it have no mode."""
        if not (self._draws or self._attends):
            return self._call(tensors, x)
        with HashedDraws(key, vectorised=True):
            return self._call(tensors, x)

    def why_not_stacked(self, template: nn.Module) -> str | None:
        """Try one step of two clients; return the reason why this model can't be stacked, or None if it can.

        Some modules cannot be vectorised (branches on values, some in-place operations); some keep state in buffers, of
        which a stacked step updates only BatchNorm's.
        """
        x, y = self._data.batch(torch.zeros((2, 2), dtype=torch.int64, device=self._data.device))
        module = batchnorm.spare(copy.deepcopy(self._template)).train()
        unsupported = [name for name, _ in module.named_buffers() if name not in batchnorm.statistics(template)]
        before = {name: t.clone() for name, t in module.named_buffers()}
        key = torch.zeros((), dtype=torch.int64, device=x.device)
        with torch.no_grad(), hashed_draws(key if self._draws else None):
            module(x[0])
        for name in unsupported:
            if not torch.equal(dict(module.named_buffers())[name], before[name]):
                return f"training changes its buffer {name}"
        if self._draws and self._draws_depend_on_padding(template):
            return "its random numbers depend on the size of the batch"
        two = torch.stack([self._layout.flatten(template)] * 2).to(self._data.device)
        named = self._layout.unflatten(two)
        parameters = {name: named.pop(name) for name in self._layout.names[: self._layout.trainable]}
        weights = torch.full((2, 2), 0.5, dtype=self._layout.dtype, device=x.device)
        keys = torch.arange(2, device=x.device) if self._draws else None
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # the result says so, if it matters
                self._module.train()
                self._gradient(parameters, named, x, y, weights, keys)
                self.forward(two, x)
        except (RuntimeError, ValueError, TypeError) as error:
            lines = str(error).strip().splitlines()
            return lines[0] if lines else type(error).__name__
        return None

    def _draws_depend_on_padding(self, template: nn.Module) -> bool:
        """Tell whether samples get other random numbers when their batch is padded, by trying it."""
        device = self._data.device
        tensors = self._layout.unflatten(self._layout.flatten(template).to(device))
        key = torch.zeros((), dtype=torch.int64, device=device)
        outputs = []
        self._module.train()
        for width in (2, 4):
            x, _ = self._data.batch(torch.arange(width, device=device) % min(2, len(self._data.y)))
            self._padding.real = (torch.arange(width, device=device) < 2).to(self._layout.dtype)
            with torch.no_grad(), hashed_draws(key):
                outputs.append(self._call(tensors, x)[:2])
        return not torch.allclose(outputs[0], outputs[1], rtol=1e-3, atol=1e-4, equal_nan=True)

    def train(self, models: torch.Tensor, jobs: Sequence[TrainJob]) -> torch.Tensor:
        """Do every job's local work, from the stacked flat ``models``; give the stacked results."""
        if len(jobs) == 1:
            return self._train_one(models, jobs)
        if self._graphs is not None and (trained := self._graphs.train(models, jobs)) is not None:
            return trained
        return self._train_stacked(models, jobs)

    def _graphed_step(self, tensors: Sequence[torch.Tensor], optimizer: StackedOptimizer, steps: Steps, k: int) -> None:
        """Do one step of all clients on fixed buffers."""
        self._module.train()
        named = dict(zip(self._layout.names, tensors, strict=True))
        trainable = self._layout.names[: self._layout.trainable]
        rest = {name: t for name, t in named.items() if name not in trainable}
        parameters = {name: named[name] for name in trainable}
        keys = steps.keys[k] if self._draws else None
        gradients, statistics = self._gradient(parameters, rest, steps.x[k], steps.y[k], steps.weights[k], keys)
        optimizer.step([gradients[name] for name in trainable], steps.rates[k])
        for name, new in statistics.items():
            named[name].copy_(new)

    def _train_stacked(self, models: torch.Tensor, jobs: Sequence[TrainJob]) -> torch.Tensor:
        named = {name: t.clone() for name, t in self._layout.unflatten(models).items()}
        trainable = self._layout.names[: self._layout.trainable]
        optimizer = StackedOptimizer(jobs[0].local, [named[name] for name in trainable], jobs[0].only)
        optimizer.prepare(jobs)
        self._module.train()
        for step in steps(jobs, self._data, draws=self._draws):
            n = len(step.x)
            active = {name: t[:n] for name, t in named.items()}
            parameters = {name: active.pop(name) for name in trainable}
            weights = step.weights
            if weights is None:
                weights = torch.full((n, step.width), 1 / step.width, dtype=self._layout.dtype, device=step.x.device)
            gradients, statistics = self._gradient(parameters, active, step.x, step.y, weights, step.keys)
            optimizer.step([gradients[name] for name in trainable], step.rate)
            for name, new in statistics.items():
                named[name][:n] = new
        return self._layout.join([named[name] for name in self._layout.names])

    def _objective(
        self,
        parameters: Tensors,
        rest: Tensors,
        x: torch.Tensor,
        y: torch.Tensor,
        weights: torch.Tensor,
        key: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Tensors]:
        self._padding.real = (weights > 0).to(weights.dtype)
        self._padding.statistics = {}
        outputs = self._call_stacked(parameters | rest, x, key)
        return (self._loss(outputs, y) * weights).sum(), self._padding.statistics

    def _train_one(self, models: torch.Tensor, jobs: Sequence[TrainJob]) -> torch.Tensor:
        if not hasattr(self._own, "module"):
            self._own.module = self._copy_for_one()
        module: nn.Module = self._own.module
        self._layout.load(module, models[0])
        module.train()
        parameters = [p for p in module.parameters() if p.requires_grad]
        optimizer = StackedOptimizer(jobs[0].local, [p.detach().unsqueeze(0) for p in parameters], jobs[0].only)
        optimizer.prepare(jobs)
        for step in steps(jobs, self._data, draws=self._draws):
            gradients = self._one_gradient(module, parameters, step)
            optimizer.step([g.unsqueeze(0) for g in gradients], step.rate)
        return self._layout.flatten(module).unsqueeze(0)

    def _copy_for_one(self) -> nn.Module:
        """Copy the model for one thread, with channels last, which makes pooling and convolutions on a CPU faster."""
        module = batchnorm.spare(copy.deepcopy(self._template))
        has_planes = any(isinstance(m, nn.Conv2d) for m in module.modules())
        return module.to(memory_format=torch.channels_last) if has_planes else module  # type: ignore[call-overload]

    def _one_gradient(
        self, module: nn.Module, parameters: Sequence[torch.Tensor], step: Step
    ) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            x = step.x[0, : step.first]
            if x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            with hashed_draws(step.keys[0] if step.keys is not None else None):
                outputs = module(x)
            objective = self._loss(outputs, step.y[0, : step.first]).mean()
            return torch.autograd.grad(objective, parameters)
