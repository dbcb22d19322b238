"""Loss functions that return one number per sample. Any callable ``(outputs, targets) -> losses`` like these works."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

PerSampleLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of class scores against class numbers.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([2])).item() == torch.tensor(4.0).log().item()
    True
    """
    return F.cross_entropy(outputs, targets, reduction="none")


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the squared error, averaged over the outputs of a sample; for regression.

    >>> squared_error(torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 2.0])).tolist()
    [1.0, 0.0]
    """
    difference = outputs.reshape(targets.shape) - targets
    return difference.square().flatten(1).mean(1) if difference.dim() > 1 else difference.square()


def hits(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the accuracy of each sample: 1 if the highest score is the right class, else 0.

    If a sample has several positions, such as a sequence, this is the mean over them.

    >>> hits(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([1, 1])).tolist()
    [1.0, 0.0]
    """
    right = (outputs.argmax(1) == targets).double()
    return right.flatten(1).mean(1) if right.dim() > 1 else right
