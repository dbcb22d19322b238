"""Tensors in safetensors files: with ordinary permissions, each by itself, with checksums, and safe on disk."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fedalign.experiments.durable_files import sync_file, sync_folder


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, info: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of any new file; the library's own are for the owner alone."""
    path.unlink(missing_ok=True)
    path.touch()
    permissions = path.stat().st_mode
    save_file(tensors, path, info)
    path.chmod(stat.S_IMODE(permissions))


def replace_tensors(
    tensors: dict[str, torch.Tensor], path: Path, info: dict[str, str] | None = None, keep: Path | None = None
) -> None:
    """Write a safetensors file in place of an earlier one, which becomes ``keep`` if that is given.

    A kill or a power failure leaves the old file or the new one, never a part; on return the new one is on disk.
    """
    fresh = path.with_suffix(".new")
    save_tensors(tensors, fresh, info)
    sync_file(fresh)  # before it has its name: after a power failure that would be the name of an empty file
    if keep is not None and path.exists():
        path.replace(keep)
    fresh.replace(path)
    sync_folder(path.parent)


def separate(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return tensors on the CPU that share no memory, as equal models do at a run's start: a file holds each alone."""
    tensors = {name: torch.as_tensor(tensor).detach().cpu().contiguous() for name, tensor in given.items()}
    return {name: tensor.clone() if _is_shared(name, tensor, tensors) else tensor for name, tensor in tensors.items()}


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a checksum of tensors and their names."""
    checksum = hashlib.sha256()
    for name in sorted(tensors):
        checksum.update(name.encode())
        # The bytes, because NumPy has no bfloat16; without a copy, because a snapshot may be hundreds of megabytes.
        checksum.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()


def _is_shared(name: str, tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether an earlier tensor lies in the same memory."""
    for other, earlier in tensors.items():
        if other == name:
            return False
        if earlier.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            return True
    return False
