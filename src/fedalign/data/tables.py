"""Samples in tables: pandas frames, and ``.csv`` and ``.parquet`` files. A row is a sample, and columns have names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedalign.data.columns import Columns, feature_names, targets
from fedalign.errors import FedalignError

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".parquet")
_INSTALL = {
    ".csv": "reading .csv files needs pandas: install it with pip install 'fedalign[pandas]'",
    ".parquet": "reading .parquet files needs pandas and pyarrow: install them with pip install 'fedalign[parquet]'",
}


def read_table(path: Path) -> pd.DataFrame:
    """Read a ``.csv`` or ``.parquet`` file; raises :class:`FedalignError` if it cannot be read."""
    try:
        import pandas as pd

        read = pd.read_parquet if path.suffix == ".parquet" else pd.read_csv
        return read(path)
    except ImportError as error:
        raise FedalignError(_INSTALL[path.suffix]) from error
    except (OSError, ValueError) as error:  # pandas' and pyarrow's own errors are ValueErrors
        lines = str(error).strip().splitlines()
        raise FedalignError(f"cannot read {path}: {lines[0] if lines else type(error).__name__}") from error


def is_frame(given: Any) -> bool:
    """Tell whether an object is a pandas frame, without importing pandas.

    >>> is_frame([1, 2])
    False
    """
    return type(given).__module__.partition(".")[0] == "pandas" and hasattr(given, "columns")


def samples_of(
    frame: pd.DataFrame, target: str | Sequence[str] | None, features: Sequence[str] | None, what: str
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the features and the targets of a frame; ``what`` names it in error messages.

    Features are all columns but the target, in the frame's order, or those that are named. They stay whole numbers if
    all columns hold such. Several targets give a row of them for each sample. Raises :class:`FedalignError` for an
    unknown column, for texts and dates among the features, and for missing values.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"age": [30, 41], "weight": [61.5, 80.0], "ill": ["no", "yes"]})
    >>> x, y = samples_of(frame, "ill", None, "the table")
    >>> x.tolist(), y.tolist()
    ([[30.0, 61.5], [41.0, 80.0]], ['no', 'yes'])
    """
    columns = Columns([str(name) for name in frame.columns], what)
    wanted = targets(columns, target)
    named = feature_names(columns, wanted, features)
    held = frame.rename(columns=str)
    x = np.stack([_numbers(held[name], name, what) for name in named], axis=1)
    y = [_target(held[name], name, what) for name in wanted]
    return x, y[0] if isinstance(target, str) else np.stack(y, axis=1)


def _numbers(column: pd.Series[Any], name: str, what: str) -> npt.NDArray[Any]:
    missing = int(column.isna().sum())
    if missing:
        raise FedalignError(f"{what}: column {name!r} has {missing} missing values; fill them, or leave their rows out")
    kind = getattr(column.dtype, "kind", "O")
    if kind not in "biuf":
        raise FedalignError(
            f"{what}: column {name!r} holds {column.dtype} values, not numbers; "
            "name the columns to train on with features, or encode it as numbers"
        )
    return column.to_numpy(dtype=np.float64 if kind == "f" else np.int64)


def _target(column: pd.Series[Any], name: str, what: str) -> npt.NDArray[Any]:
    if column.isna().any():
        raise FedalignError(f"{what}: the target column {name!r} has missing values; leave their rows out")
    kind = getattr(column.dtype, "kind", "O")
    if kind in "biuf":
        return column.to_numpy(dtype=np.float64 if kind == "f" else np.int64)
    return column.astype(str).to_numpy(dtype=np.str_)
