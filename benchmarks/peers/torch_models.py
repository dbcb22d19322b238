"""The models, for the peers on PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from workload import CASES, initial


def make(case: str) -> nn.Module:
    torch.manual_seed(0)
    shape, hidden, classes, _, _ = CASES[case]
    if hidden is None:
        return nn.Sequential(
            nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(1600, 512), nn.BatchNorm1d(512), nn.ReLU(),
            nn.Linear(512, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, classes),
        )  # fmt: skip
    layers: list[nn.Module] = []
    width = shape[0]
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    model = nn.Sequential(*layers, nn.Linear(width, classes))
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer, (weights, bias) in zip(linear, initial(case), strict=True):
            layer.weight.copy_(torch.as_tensor(weights.T))
            layer.bias.copy_(torch.as_tensor(bias))
    return model


@torch.no_grad()
def accuracy(model: nn.Module, data: list) -> float:
    model.eval()
    right = sum(int((model(torch.as_tensor(x)).argmax(1) == torch.as_tensor(y)).sum()) for x, y in data)
    return right / sum(len(y) for _, y in data)
