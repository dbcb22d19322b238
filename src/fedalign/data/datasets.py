"""Samples in data sets of other libraries: PyTorch's, Hugging Face's and the partitions of flwr-datasets.

None of these libraries but PyTorch is imported here: their objects are known by what they can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedalign.data.columns import Columns, feature_names, targets
from fedalign.errors import FedalignError

Pair = tuple[Any, Any]


def is_torch_dataset(given: Any) -> bool:
    """Tell whether an object is a ``torch.utils.data.Dataset``, or has samples by number as one."""
    return isinstance(given, Dataset) or (
        hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, Sequence | Mapping)
    )


def is_hugging_face(given: Any) -> bool:
    """Tell whether an object is a ``datasets.Dataset``."""
    return hasattr(given, "column_names") and hasattr(given, "with_format")


def from_torch(given: Any, what: str) -> Pair:
    """Stack the samples of a PyTorch data set, which are pairs (x, y); images of one size, sequences of one length.

    >>> x, y = from_torch(TensorDataset(torch.zeros(5, 3), torch.arange(5)), "the data")
    >>> tuple(x.shape), tuple(y.shape)
    ((5, 3), (5,))
    """
    if isinstance(given, TensorDataset) and len(given.tensors) == 2:
        return given.tensors[0], given.tensors[1]
    items = list(given) if isinstance(given, IterableDataset) else [given[i] for i in range(len(given))]
    if not items:
        raise FedalignError(f"{what}: there are no samples; leave the client out or give it some")
    if not all(isinstance(item, Sequence) and len(item) == 2 for item in items):
        raise FedalignError(f"{what}: a sample must be a pair (x, y), not {items[0]!r:.60}")
    return _stacked([x for x, _ in items], what), _stacked([y for _, y in items], what)


def _stacked(values: list[Any], what: str) -> Any:
    if all(isinstance(value, str) for value in values):
        return values
    try:
        return torch.stack([torch.as_tensor(value) for value in values])
    except (RuntimeError, TypeError, ValueError) as error:
        raise FedalignError(f"{what}: its samples cannot be stacked: {str(error).splitlines()[0]}") from error


def from_hugging_face(
    given: Any, target: str | Sequence[str] | None, features: Sequence[str] | None, what: str
) -> Pair:
    """Return the features and targets of a ``datasets.Dataset``.

    One feature column may hold images, sequences or arrays; images become uint8 with channels first. Several columns
    must hold one number each, and become a vector. Raises :class:`FedalignError` for texts among the features.
    """
    columns = Columns(list(given.column_names), what)
    wanted = targets(columns, target)
    named = feature_names(columns, wanted, features)
    held = given.with_format("torch")[:]
    x = [_column(held[name], name, what) for name in named]
    if len(x) > 1 and any(one.dim() > 1 for one in x):
        wide = named[next(i for i, one in enumerate(x) if one.dim() > 1)]
        raise FedalignError(f"{what}: column {wide!r} holds arrays; name it alone, as in features = ['{wide}']")
    y = [held[name] if _is_texts(held[name]) else _column(held[name], name, what) for name in wanted]
    return x[0] if len(x) == 1 and x[0].dim() > 1 else torch.stack(x, dim=1), y[0] if isinstance(
        target, str
    ) else torch.stack(y, dim=1)


def class_names(given: Any, target: Any) -> tuple[str, ...] | None:
    """Return the names of classes that a ``datasets.Dataset`` has for its target, if any."""
    feature = getattr(given, "features", {}).get(target) if is_hugging_face(given) and isinstance(target, str) else None
    names = getattr(feature, "names", None)
    return tuple(names) if names else None


def partitions(given: Any) -> dict[str, Any] | None:
    """Return the clients of a ``flwr_datasets`` partitioner or ``FederatedDataset``; None for anything else.

    The clients are called ``"0"``, ``"1"`` and so on, as partitions are.
    """
    if not hasattr(given, "load_partition"):
        return None
    partitioners = getattr(given, "partitioners", None)
    if partitioners:
        if len(partitioners) > 1:
            raise FedalignError(
                f"the FederatedDataset divides {len(partitioners)} splits ({', '.join(partitioners)}); "
                "give the partitioner of one, with test= for the other"
            )
        split, partitioner = next(iter(partitioners.items()))
        given.load_partition(0, split)  # loads the data, so that the number of partitions is known
        return {str(k): given.load_partition(k, split) for k in range(partitioner.num_partitions)}
    return {str(k): given.load_partition(k) for k in range(given.num_partitions)}


def _is_texts(values: Any) -> bool:
    return isinstance(values, Sequence) and bool(values) and all(isinstance(value, str) for value in values)


def _column(values: Any, name: str, what: str) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    values = list(values)
    if _is_texts(values):
        raise FedalignError(f"{what}: column {name!r} holds texts; name the columns to train on with features")
    shapes = {tuple(value.shape) for value in values if isinstance(value, torch.Tensor)}
    if len(shapes) != 1 or not all(isinstance(value, torch.Tensor) for value in values):
        raise FedalignError(f"{what}: the values of column {name!r} differ in shape; pad or resize them first")
    return torch.stack(values)
