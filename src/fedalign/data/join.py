"""Joins the samples of all clients into one pool; labels that are texts become class numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedalign.data.labels import classes_of, numbered
from fedalign.data.rows import NO_ROWS, Rows
from fedalign.data.samples import Arrays, Tensors, as_tensors, check_alike
from fedalign.errors import FedalignError


@dataclass(frozen=True)
class Joined:
    """All samples together, and which rows are each client's training, held-out and test samples."""

    x: torch.Tensor
    y: torch.Tensor
    classes: tuple[str, ...] | None
    train: list[Rows]
    heldout: list[Rows]
    test: list[Rows]


def join(
    names: Sequence[str],
    train: Sequence[Arrays],
    heldout: Sequence[Arrays] | None,
    test: Sequence[Arrays | None] | None,
) -> Joined:
    """Join the samples of clients; raises :class:`FedalignError`, which names the client whose data do not fit.

    >>> joined = join(["a", "b"], [([[1.0]], ["cat"]), ([[2.0]], ["ant"])], None, None)
    >>> joined.y.tolist(), joined.classes
    ([1, 0], ('ant', 'cat'))
    """
    labels = [_labels(arrays) for split in (train, heldout, test) for arrays in split or [] if arrays is not None]
    classes = classes_of([y for y in labels if y is not None])
    parts: list[Tensors] = []
    offset = 0

    def add(arrays: Arrays | None, what: str) -> Rows:
        nonlocal offset
        if arrays is None:
            return NO_ROWS
        if classes is not None:
            arrays = (arrays[0], numbered(arrays[1], classes))
        x, y = as_tensors(arrays, what)
        if parts:
            check_alike((x, y), parts[0], what, "the first client's")
        parts.append((x, y))
        offset += len(y)
        return np.arange(offset - len(y), offset, dtype=np.int64)

    train_rows = [add(arrays, f"client {name!r}, training data") for arrays, name in zip(train, names, strict=True)]
    held_rows = [add(a, f"client {n!r}, held-out data") for a, n in zip(heldout or [], names, strict=False)]
    test_rows = [add(a, f"client {n!r}, test data") for a, n in zip(test or [], names, strict=False)]
    if not parts:
        raise FedalignError("the federation has no clients")
    x, y = (torch.cat([part[i] for part in parts]) for i in range(2))
    return Joined(x, y, classes, train_rows, held_rows, test_rows)


def _labels(arrays: Any) -> Any:
    """Return the labels of features and labels; None for something else, which is refused later."""
    return arrays[1] if isinstance(arrays, tuple | list) and len(arrays) == 2 else None
