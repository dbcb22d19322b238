"""The samples of a federation in one pool, read from arrays or tensors and checked."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedalign.errors import FedalignError
from fedalign.training.losses import IGNORED

Arrays = tuple[Any, Any]  # features and labels: NumPy arrays, tensors or nested lists
Tensors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples of a federation. uint8 features stay uint8 and become ``(x/255 − mean)/std`` in each batch.

    >>> Pool(torch.zeros(3, 2), torch.tensor([0, 1, 1])).has_classes
    True
    """

    x: torch.Tensor
    y: torch.Tensor
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0
    classes: tuple[str, ...] | None = None  #: the names of classes 0, 1, …, where labels were given as texts

    def __post_init__(self) -> None:
        x, y = as_tensors((self.x, self.y), "the data")
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "y", y)
        for name in ("mean", "std"):
            value = np.asarray(getattr(self, name), np.float64)
            channels = x.shape[1] if x.dim() > 1 else 1
            if (
                value.size not in (1, channels)
                or not np.isfinite(value).all()
                or (name == "std" and (value <= 0).any())
            ):
                need = "a positive number" if name == "std" else "a number"
                raise FedalignError(
                    f"{name} must be {need}, or one per channel ({channels}), not {getattr(self, name)}"
                )

    @property
    def has_classes(self) -> bool:
        """Whether labels are class numbers, so that an accuracy can be computed."""
        return not self.y.is_floating_point()


def as_tensors(arrays: Arrays, what: str) -> Tensors:
    """Return features and labels as tensors; refuse wrong shapes, empty data, NaN, infinity and negative classes.

    ``what`` names the data in error messages.
    """
    try:
        x_raw, y_raw = arrays
        x, y = _tensor(x_raw), _tensor(y_raw)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FedalignError(f"{what}: cannot be read as (features, labels): {error}") from error
    x, y = x.detach().cpu(), y.detach().cpu()
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y):
        raise FedalignError(
            f"{what}: features of shape {tuple(x.shape)} and labels of shape {tuple(y.shape)} don't match"
        )
    if not len(y):
        raise FedalignError(f"{what}: there are no samples; leave the client out or give it some")
    if x.is_complex() or y.is_complex():
        raise FedalignError(f"{what}: complex numbers cannot be trained on; give their real and imaginary parts")
    if x.is_floating_point():
        x = x if x.dtype == torch.float64 else x.float()
        row = _first_not_finite(x)
        if row is not None:
            raise FedalignError(f"{what}: the features of sample {row} hold NaN or infinity; clean the data first")
    if y.is_floating_point():
        y = y if y.dtype == torch.float64 else y.float()
        if not torch.isfinite(y).all():
            raise FedalignError(f"{what}: the labels hold NaN or infinity; clean the data first")
    else:
        y = y.long()
        lowest = int((y if y.dim() < 2 else y.masked_fill(y == IGNORED, 0)).min())  # padding of sequences
        if lowest < 0:
            raise FedalignError(f"{what}: label {lowest} is negative; classes count from 0, or are texts")
    return x, y


def _tensor(given: Any) -> torch.Tensor:
    """Return an array as a tensor, without a copy if possible; read-only memory-mapped files are fine.

    What PyTorch has no tensors of is copied: arrays with negative strides, in another byte order or of other types.
    Raises ValueError for texts, dates and samples of different shapes.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        try:
            found = torch.as_tensor(np.asarray(given) if _has_array(given) else given)
        except (TypeError, ValueError, RuntimeError):
            found = torch.as_tensor(_plain_array(given))
    # The other whole numbers have few operations; an embedding takes none of them.
    return found if found.dtype in _KEPT or found.is_floating_point() or found.is_complex() else found.long()


def _has_array(given: Any) -> bool:
    """Tell whether an object of another library, such as pandas, says how it becomes an array."""
    return hasattr(given, "__array__") and not isinstance(given, np.ndarray | torch.Tensor)


_KEPT = (torch.uint8, torch.int32, torch.int64, torch.bool)


def _plain_array(given: Any) -> npt.NDArray[Any]:
    """Return an array that PyTorch can read."""
    array = np.asarray(given)
    if array.dtype.kind == "O":
        array = _from_objects(array)
    if array.dtype.kind not in "biufc":
        noun = {"U": "texts", "S": "texts", "M": "dates", "m": "durations"}.get(array.dtype.kind, str(array.dtype))
        raise ValueError(f"they hold {noun}, not numbers")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array) if any(stride < 0 for stride in array.strides) else array


def _from_objects(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the numbers, or the stacked arrays, that an array of Python objects holds."""
    if any(isinstance(item, str) for item in array.reshape(-1)[:1]):
        raise ValueError("they hold texts, not numbers")
    return np.array([np.asarray(item) for item in array]) if array.ndim == 1 else array.astype(np.float64)


def _first_not_finite(x: torch.Tensor) -> int | None:
    """Return the first sample with NaN or infinity, if any; checked in chunks, as the data may not fit into memory."""
    rows = max(1, (16 << 20) // max(1, x[0].numel()))
    for start in range(0, len(x), rows):
        part = torch.isfinite(x[start : start + rows]).reshape(len(x[start : start + rows]), -1).all(1)
        if not part.all():
            return start + int(torch.nonzero(~part)[0])
    return None


def check_alike(given: Tensors, first: Tensors, what: str, whose: str) -> None:
    """Refuse samples or labels whose type or shape differs from the first client's."""
    for name, found, wanted in (("samples", given[0], first[0]), ("labels", given[1], first[1])):
        same_type = _family(found) == _family(wanted)
        if found.shape[1:] != wanted.shape[1:] or not same_type:
            raise FedalignError(f"{what}: {name} are {_kind(found)}, but {whose} are {_kind(wanted)}; all must agree")


def _family(t: torch.Tensor) -> str:
    """Name the type of numbers, by which samples of several clients can be joined; uint8 data are pixels."""
    if t.is_floating_point():
        return "numbers"
    return "pixels" if t.dtype == torch.uint8 else "whole numbers"


def _kind(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape[1:])}"
