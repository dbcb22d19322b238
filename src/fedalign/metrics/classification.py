"""Metrics of classification: of class scores, of a single logit, and of several labels per sample.

All take outputs before softmax or sigmoid. A class that does not occur in the targets is left out of a mean over
classes, because a client may not have it; where nothing is left the result is NaN, which stands for "undefined".
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedalign.errors import FedalignError

_IGNORED = -100  # PyTorch's ``ignore_index``: a target that does not count, such as padding
Average = Literal["macro", "micro", "none"]


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the fraction of correct predictions.

    >>> accuracy(torch.tensor([[0.1, 2.0], [1.0, 0.0]]), torch.tensor([1, 1])).item()
    0.5
    """
    scores, truth = scores_and_truth(outputs, targets)
    if truth.shape == scores.shape:
        return ((scores > 0) == (truth > 0.5)).double().mean()
    return (scores.argmax(1) == truth).double().mean()


def balanced_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of the classes' recalls.

    >>> balanced_accuracy(torch.tensor([[2.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])).item()
    0.5
    """
    return recall(outputs, targets, "macro")


def f1(outputs: Tensor, targets: Tensor, average: Average = "macro") -> Tensor:
    """Return F1, the harmonic mean of precision and recall; ``average="none"`` gives it for each class.

    >>> f1(torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0, 1])).item()
    0.6666666666666666
    """
    hit, predicted, actual = _counts(outputs, targets)
    return _averaged(2 * hit, predicted + actual, actual, average)


def precision(outputs: Tensor, targets: Tensor, average: Average = "none") -> Tensor:
    """Return, for each class, the fraction of the samples predicted to be of it that are.

    >>> precision(torch.tensor([[2.0, 0.0], [3.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 1, 1])).tolist()
    [0.5, 1.0]
    """
    hit, predicted, actual = _counts(outputs, targets)
    return _averaged(hit, predicted, actual, average)


def recall(outputs: Tensor, targets: Tensor, average: Average = "none") -> Tensor:
    """Return, for each class, the fraction of its samples that are predicted to be of it.

    >>> recall(torch.tensor([[2.0, 0.0], [3.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 1, 1])).tolist()
    [1.0, 0.5]
    """
    hit, _, actual = _counts(outputs, targets)
    return _averaged(hit, actual, actual, average)


def auc(outputs: Tensor, targets: Tensor, average: Literal["macro", "none"] = "macro") -> Tensor:
    """Return the area under the ROC curve: one class against the others, and the mean over classes.

    A class without samples, or with all of them, is undefined.

    >>> auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])).item()
    0.75
    """
    scores, truth = scores_and_truth(outputs, targets)
    if truth.shape != scores.shape:
        scores = scores.double().log_softmax(1)  # of two classes, the difference of both scores decides
        truth = torch.nn.functional.one_hot(truth, scores.shape[1])
    each = torch.stack([_area(scores[:, c].double(), truth[:, c] > 0.5) for c in range(scores.shape[1])])
    return each if average == "none" and len(each) > 1 else each.nanmean()


def top_k(outputs: Tensor, targets: Tensor, k: int = 5) -> Tensor:
    """Return the fraction of samples whose class is among the ``k`` highest scores.

    >>> top_k(torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), torch.tensor([1, 2]), k=2).item()
    0.5
    """
    scores, truth = scores_and_truth(outputs, targets)
    if truth.shape == scores.shape or not 1 <= k <= scores.shape[1]:
        raise FedalignError(f"top-k with k={k} needs at least {max(k, 2)} classes, one of them right for each sample")
    return (scores.topk(k, 1).indices == truth[:, None]).any(1).double().mean()


def calibration_error(outputs: Tensor, targets: Tensor, bins: int = 15) -> Tensor:
    """Return the expected calibration error: by how much confidence and accuracy differ, in bins of confidence.

    >>> round(calibration_error(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1])).item(), 3)
    0.5
    """
    scores, truth = scores_and_truth(outputs, targets)
    if truth.shape == scores.shape:
        chance = scores.double().sigmoid().flatten()
        confidence, right = torch.where(chance > 0.5, chance, 1 - chance), (chance > 0.5) == (truth.flatten() > 0.5)
    else:
        confidence, predicted = scores.double().softmax(1).max(1)
        right = predicted == truth
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, confidence - right.double())
    return gap.abs().sum() / len(confidence)


def scores_and_truth(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Bring outputs and targets into one of two forms: scores (n, classes) with classes (n), or logits with labels.

    A single logit, and one for each of several labels, give logits and labels of one shape (n, labels). Positions of
    a sequence count as samples, with the classes' scores last, or before them as PyTorch's cross-entropy has them;
    targets of -100 do not count.
    Raises :class:`FedalignError` for other shapes.
    """
    outputs, targets = outputs.detach(), targets.detach()
    if outputs.shape in (targets.shape, (*targets.shape, 1)):  # one logit for every target
        labels = targets.reshape(len(targets), -1)
        return outputs.reshape(labels.shape), labels
    last = outputs.shape[:-1] == targets.shape
    if last or outputs.shape[:1] + outputs.shape[2:] == targets.shape:
        scores = outputs if last else outputs.movedim(1, -1)
        counts = (targets != _IGNORED).reshape(-1)
        return scores.reshape(-1, scores.shape[-1])[counts], targets.reshape(-1)[counts].long()
    raise FedalignError(
        f"a metric of classification takes scores of every class or a logit for every label; outputs of shape "
        f"{tuple(outputs.shape)} and targets of shape {tuple(targets.shape)} are neither"
    )


def _counts(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, for each class, the samples that are predicted and of the class, predicted, and of the class."""
    scores, truth = scores_and_truth(outputs, targets)
    if truth.shape == scores.shape:
        said, actual = scores > 0, truth > 0.5
        return (said & actual).sum(0).double(), said.sum(0).double(), actual.sum(0).double()
    classes, predicted = scores.shape[1], scores.argmax(1)
    return (
        torch.bincount(truth[predicted == truth], minlength=classes).double(),
        torch.bincount(predicted, minlength=classes).double(),
        torch.bincount(truth, minlength=classes).double(),
    )


def _averaged(top: Tensor, bottom: Tensor, actual: Tensor, average: Average) -> Tensor:
    if average == "micro":
        return top.sum() / bottom.sum()
    each = torch.where(bottom > 0, top / bottom, 0.0).where(actual > 0, torch.nan)
    return each if average == "none" and len(each) > 1 else each.nanmean()


def _area(scores: Tensor, positive: Tensor) -> Tensor:
    """Return the chance that a positive sample's score is above a negative one's; ties count half."""
    above, below = int(positive.sum()), int((~positive).sum())
    if not above or not below:
        return torch.tensor(torch.nan, dtype=torch.float64)
    _, place, count = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks: Tensor = (count.cumsum(0).double() - (count - 1) / 2)[place]  # equal scores have their mean rank
    return (ranks[positive].sum() - above * (above + 1) / 2) / (above * below)
