"""The models of the paper, and the names that experiments use for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fedalign.errors import FedalignError


def logistic(inputs: int, classes: int) -> nn.Module:
    """Build a multinomial logistic regression.

    >>> logistic(784, 10)
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=784, out_features=10, bias=True)
    )
    """
    _at_least_one(inputs=inputs, classes=classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


def linear(inputs: int, outputs: int = 1) -> nn.Module:
    """Build a linear model without bias, in double precision and with weights of zero, for experiments on theory.

    >>> linear(3)
    Linear(in_features=3, out_features=1, bias=False)
    """
    _at_least_one(inputs=inputs, outputs=outputs)
    model = nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def mlp(inputs: int, hidden: Sequence[int], classes: int) -> nn.Module:
    """Build a network of fully connected ReLU layers; the paper uses ``mlp(784, [200, 200], 47)`` for EMNIST.

    >>> sum(p.numel() for p in mlp(784, [200, 200], 47).parameters())
    206647
    """
    _at_least_one(inputs=inputs, classes=classes)
    layers: list[nn.Module] = [nn.Flatten()]
    for width in hidden:
        _at_least_one(hidden=width)
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return _with_head(nn.Sequential(*layers, nn.Linear(inputs, classes)))


def cnn(channels: int = 3, classes: int = 10) -> nn.Module:
    """Build the CNN of the paper for 32×32 images: two 5×5 convolutions, three linear layers, BatchNorm, Kaiming init.

    >>> cnn()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    _at_least_one(channels=channels, classes=classes)
    model = nn.Sequential(
        nn.Conv2d(channels, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1600, 512),
        nn.BatchNorm1d(512),
        nn.ReLU(),
        nn.Linear(512, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )
    for module in list(model)[:-1]:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return _with_head(model)


def _with_head(model: nn.Sequential) -> nn.Module:
    """Name the last layer as the model's head, which clients may train by themselves (``local-head``)."""
    model.head = str(len(model) - 1)  # type: ignore[assignment]
    return model


def _at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise FedalignError(f"model.{name} must be at least 1, not {size}")


BY_NAME: dict[str, Callable[..., nn.Module]] = {"logistic": logistic, "linear": linear, "mlp": mlp, "cnn": cnn}
