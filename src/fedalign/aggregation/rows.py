"""Sums, lengths and distances of clients' models, which are rows, without a second copy of all of them."""

from __future__ import annotations

import torch

_COLUMNS = 1 << 16  # converted to double precision at a time


def weighted_sum(models: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum rows times their weights, with no copy of all rows; rows of weight 0 are left out.

    >>> weighted_sum(torch.tensor([[1.0], [2.0], [9.0]]), torch.tensor([0.5, 0.5, 0.0]))
    tensor([1.5000])
    """
    total = torch.zeros_like(models[0])
    for model, weight in zip(models, weights.tolist(), strict=True):
        if weight:
            total.add_(model, alpha=weight)
    return total


def squared_distances(vectors: torch.Tensor) -> torch.Tensor:
    """Return the squared Euclidean distances between rows (clients × clients), in double precision.

    Differences are squared, not expanded into products: models lie much nearer to each other than to zero.

    >>> squared_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    tensor([[ 0., 25.],
            [25.,  0.]], dtype=torch.float64)
    """
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64, device=vectors.device)
    for columns in torch.split(vectors, _COLUMNS, dim=1):
        exact = columns.double()
        total += torch.cdist(exact, exact, compute_mode="donot_use_mm_for_euclid_dist").square_()
    return total


def products_of(vectors: torch.Tensor) -> torch.Tensor:
    """Return the inner products of rows with each other (clients × clients), in double precision.

    >>> products_of(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    tensor([[25.,  8.],
            [ 8.,  4.]], dtype=torch.float64)
    """
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64, device=vectors.device)
    for columns in torch.split(vectors, _COLUMNS, dim=1):
        exact = columns.double()
        total += exact @ exact.T
    return total


def lengths_of(vectors: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean length of every row, in double precision.

    >>> lengths_of(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    tensor([5., 2.], dtype=torch.float64)
    """
    lengths: torch.Tensor = torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64)
    return lengths


def weighted_rows(weights: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return ``weights @ vectors``, multiplied in double precision also where a GPU may use TF32.

    >>> weighted_rows(torch.tensor([[0.5, 0.5], [0.0, 1.0]]), torch.tensor([[2.0], [4.0]]))
    tensor([[3.],
            [4.]])
    """
    parts = [
        (weights.double() @ columns.double()).to(vectors.dtype) for columns in torch.split(vectors, _COLUMNS, dim=1)
    ]
    return torch.cat(parts, dim=1)
