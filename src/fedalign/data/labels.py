"""Labels that are texts: the classes of all clients together, numbered in alphabetical order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedalign.errors import FedalignError


def classes_of(labels: Sequence[Any]) -> tuple[str, ...] | None:
    """List the classes of labels that are texts, sorted; None where the labels are numbers.

    ``labels`` has one array for each client. Raises :class:`FedalignError` if some are texts and others are numbers.

    >>> classes_of([["cat", "dog"], ["ant", "dog"]])
    ('ant', 'cat', 'dog')
    """
    texts = [_texts(one) for one in labels]
    if all(one is None for one in texts):
        return None
    if any(one is None for one in texts):
        raise FedalignError("the labels of some clients are texts, and those of others are numbers; give all as texts")
    return tuple(sorted({text for one in texts if one is not None for text in np.unique(one).tolist()}))


def numbered(labels: Any, classes: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return texts as class numbers, in the shape that they have.

    >>> numbered(["dog", "ant"], ("ant", "cat", "dog")).tolist()
    [2, 0]
    """
    texts = _texts(labels)
    assert texts is not None
    return np.searchsorted(np.array(classes), texts)


def _texts(labels: Any) -> npt.NDArray[np.str_] | None:
    """Return labels as an array of texts; None if they are something else, such as numbers."""
    if isinstance(labels, torch.Tensor):
        return None
    array = np.asarray(labels)
    if array.dtype.kind == "S":
        return np.char.decode(array, "utf-8")
    if array.dtype.kind == "O" and array.size and all(isinstance(item, str) for item in array.reshape(-1)):
        return array.astype(np.str_)
    return array if array.dtype.kind == "U" else None
