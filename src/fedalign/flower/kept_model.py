"""Where a node keeps a model that the server delivers at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from fedalign.errors import FedalignError
from fedalign.experiments.tensor_files import replace_tensors, separate


def path_of(file: Path, kind: str) -> Path:
    """Return the file for a kind of model: the one that the owner named for the final model, others beside it.

    >>> path_of(Path("model.safetensors"), "final").name, path_of(Path("model.safetensors"), "refined").name
    ('model.safetensors', 'model-refined.safetensors')
    """
    if not kind.isidentifier():
        raise FedalignError(f"a kind of model is a word, not {kind[:40]!r}")  # it becomes a part of a file's name
    return file if kind == "final" else file.with_stem(f"{file.stem}-{kind}")


def keep_model(file: Path, kind: str, tensors: Mapping[str, torch.Tensor], run: int) -> Path:
    """Write a model's tensors, in place of those of an earlier run, and return the file."""
    path = path_of(file, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_tensors(separate(tensors), path, {"run": str(run), "kind": kind})
    return path
