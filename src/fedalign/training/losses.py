"""Loss functions that return one number per sample. Any callable ``(outputs, targets) -> losses`` like these works."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

PerSampleLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_SQUARES = 4  # temperatures whose exponentials are made of one
IGNORED = -100  #: a target that does not count, such as padding; PyTorch's ``ignore_index``


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of class scores against class numbers.

    ``targets`` of shape (n, T), as of sequences, have a class at every position. Scores are then (n, T, classes) or,
    as in PyTorch, (n, classes, T), and a sample's loss is the mean over its positions; those of -100 do not count.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([2])).item() == torch.tensor(4.0).log().item()
    True
    >>> losses = cross_entropy(torch.zeros(2, 3, 8), torch.tensor([[1, 0, 5], [7, -100, -100]]))
    >>> [round(loss, 3) for loss in losses.tolist()]
    [2.079, 2.079]
    """
    if targets.dim() < 2:
        return F.cross_entropy(outputs, targets, reduction="none")
    losses = F.cross_entropy(classes_first(outputs, targets), targets, reduction="none", ignore_index=IGNORED)
    return _mean_over_positions(losses, targets)


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the squared error, averaged over the outputs of a sample; for regression.

    >>> squared_error(torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 2.0])).tolist()
    [1.0, 0.0]
    """
    difference = outputs.reshape(targets.shape) - targets
    return difference.square().flatten(1).mean(1) if difference.dim() > 1 else difference.square()


def binary_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of logits against targets of 0 and 1, averaged over the labels of a sample.

    It is for two classes with one logit (targets (n,), outputs (n,) or (n, 1)), and for multi-label tasks (targets
    and outputs (n, labels)).

    >>> binary_cross_entropy(torch.zeros(2, 1), torch.tensor([0, 1])).tolist()
    [0.6931471824645996, 0.6931471824645996]
    """
    logits = outputs.reshape(targets.shape)
    losses = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def takes_logits(loss: PerSampleLoss) -> bool:
    """Tell whether outputs divided by a temperature are outputs, too, so that the loss can be computed with them.

    So it is with both cross-entropies. A loss function of your own may say so by an attribute ``takes_logits = True``.

    >>> takes_logits(cross_entropy), takes_logits(squared_error)
    (True, False)
    """
    return loss in (cross_entropy, binary_cross_entropy) or bool(getattr(loss, "takes_logits", False))


def tempered_losses(
    loss: PerSampleLoss, outputs: torch.Tensor, targets: torch.Tensor, temperatures: Sequence[float]
) -> torch.Tensor:
    """Return each sample's loss with the outputs divided by each temperature: (samples, temperatures).

    >>> outputs, targets = torch.tensor([[2.0, 0.0]]), torch.tensor([1])
    >>> [round(value, 3) for value in tempered_losses(cross_entropy, outputs, targets, (1.0, 4.0))[0].tolist()]
    [2.127, 0.974]
    """
    return torch.stack([loss(outputs / temperature, targets).double() for temperature in temperatures], 1)


def quick_tempered_losses(
    loss: PerSampleLoss, outputs: torch.Tensor, targets: torch.Tensor, temperatures: Sequence[float]
) -> torch.Tensor:
    """Return :func:`tempered_losses` up to rounding, on a CPU many times faster.

    It is for temperatures each of which is half the next but one. The exponentials at one of them are then squares of
    those at the other. A sample's losses do not depend on the samples beside it.

    >>> outputs, targets, temperatures = torch.tensor([[2.0, 0.0]]), torch.tensor([1]), (1.0, 1.5, 2.0)
    >>> quick = quick_tempered_losses(cross_entropy, outputs, targets, temperatures)
    >>> torch.allclose(quick, tempered_losses(cross_entropy, outputs, targets, temperatures))
    True
    """
    if loss is not cross_entropy or targets.dim() > 1 or outputs.device.type != "cpu":
        return tempered_losses(loss, outputs, targets, temperatures)
    scores = (outputs - outputs.max(1, keepdim=True).values).t().contiguous()
    own = scores.gather(0, targets[None])[0]
    found = torch.empty(len(temperatures), len(targets), dtype=torch.float64)
    powers = scores  # replaced in the first step
    for parity in (0, 1):
        for step, i in enumerate(range(len(temperatures) - 1 - parity, -1, -2)):
            # Squares double the relative error, so a few of them in a row are enough.
            powers = powers.square_() if step % _SQUARES else torch.exp(scores / temperatures[i])
            total = powers[0].clone()
            for one in powers[1:]:  # in this order for every sample
                total += one
            found[i] = torch.log_(total) - own / temperatures[i]
    return found.t()


def hits(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the accuracy of each sample, from 0 to 1.

    Where there are scores of classes, it is 1 if the highest score is the right class. Where there is one logit for
    each target, of two classes or of several labels, a logit above 0 says yes. A sample with several positions or
    labels has the mean over them.

    >>> hits(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([1, 1])).tolist()
    [1.0, 0.0]
    >>> hits(torch.tensor([[1.0, -2.0, 3.0]]), torch.tensor([[1, 0, 0]])).tolist()
    [0.6666666666666666]
    """
    if has_logits(outputs, targets):
        right = (outputs.reshape(targets.shape) > 0) == (targets > 0.5)
    else:
        right = classes_first(outputs, targets).argmax(1) == targets
    return _mean_over_positions(right.double(), targets)


def has_logits(outputs: torch.Tensor, targets: torch.Tensor) -> bool:
    """Tell whether there is one number for every target, and not scores of several classes.

    >>> has_logits(torch.zeros(5, 1), torch.zeros(5)), has_logits(torch.zeros(5, 3), torch.zeros(5))
    (True, False)
    """
    return outputs.shape == targets.shape or outputs.shape == (*targets.shape, 1)


def classes_first(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return scores as PyTorch has them, (n, classes, positions), also where classes are the last dimension.

    >>> classes_first(torch.zeros(2, 5, 9), torch.zeros(2, 5)).shape
    torch.Size([2, 9, 5])
    """
    return outputs.movedim(-1, 1) if targets.dim() > 1 and outputs.shape[1:-1] == targets.shape[1:] else outputs


def _mean_over_positions(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Average over the positions of a sample that count; a sample without any has 0."""
    if values.dim() < 2:
        return values
    if targets.is_floating_point():
        return values.flatten(1).mean(1)
    counted = (targets != IGNORED).flatten(1).to(values.dtype)
    return (values.flatten(1) * counted).sum(1) / counted.sum(1).clamp(min=1)
