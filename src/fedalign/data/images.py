"""Federations over an image data set: how its samples are split among clients, and each client's test set."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from fedalign.data.federation import Federation
from fedalign.data.idx import read_idx_folder
from fedalign.data.image_sets import SOURCES
from fedalign.data.partition import (
    Labels,
    Rows,
    by_sizes,
    dirichlet,
    iid,
    largest_shard,
    limited,
    shards,
    with_same_mix,
)
from fedalign.data.samples import Pool
from fedalign.data.shifts import changed, permutations, rotations
from fedalign.data.source import Source, Splits, check_splits, data_folder
from fedalign.errors import FedalignError, FederationWarning


@dataclass(frozen=True)
class ImageData:
    """Settings of a federation over images; :meth:`federation` splits the data among the clients.

    The first ``priority`` clients are the priority clients. The partition is random, so this choice is random too.
    ``rotations`` and ``permuted`` make free clients whose data differ in kind (``shifts.py``), in all their splits.
    """

    source: ClassVar[Source]
    clients: int = 60
    priority: int = 2  #: how many of the clients are priority clients
    partition: Literal["shards", "dirichlet", "iid", "sizes"] = "shards"
    shards: int = 2  #: single-class shards of each client
    shard_size: int | None = None  #: most samples of a shard (default: as many as the data allows)
    replacement: bool = False  #: whether a shard may go to several clients
    alpha: float = 0.5  #: concentration of the Dirichlet distribution
    sizes: list[int] | None = None  #: number of samples of each client, for partition = "sizes"
    samples: int | None = None  #: most samples of a client, including held-out ones
    test_samples: int | None = 1000  #: most test samples of a client
    heldout_fraction: float = 0.2
    rotations: list[float] | None = None  #: angles in degrees, by which the free clients' images are rotated, in turn
    permuted: float = 0.0  #: part of the free clients whose labels are permuted, for all of them alike
    #: read idx files from this folder (a path, or a name in FEDALIGN_DATA) in place of the official files
    folder: str | None = None

    def __post_init__(self) -> None:
        for name in ("clients", "priority", "shards", "shard_size", "samples", "test_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FedalignError(f"data.{name} must be at least 1, not {value}")
        if self.samples == 1:
            raise FedalignError("data.samples must be at least 2: one to train on and one to hold out")
        if self.priority > self.clients:
            raise FedalignError(f"data.priority is {self.priority}, but there are {self.clients} clients")
        if self.partition not in ("shards", "dirichlet", "iid", "sizes"):
            raise FedalignError(
                f"data.partition must be 'shards', 'dirichlet', 'iid' or 'sizes', not {self.partition!r}"
            )
        if self.partition == "sizes" and len(self.sizes or []) != self.clients:
            raise FedalignError(f"data.sizes must have a number for each of the {self.clients} clients")
        if not 0 <= self.heldout_fraction < 1:
            raise FedalignError(f"data.heldout_fraction must be in [0, 1), not {self.heldout_fraction}")
        if self.rotations is not None and not (self.rotations and all(map(math.isfinite, self.rotations))):
            raise FedalignError(f"data.rotations must hold angles in degrees, not {self.rotations}")
        if not 0 <= self.permuted <= 1:
            raise FedalignError(f"data.permuted must be a part of the free clients, from 0 to 1, not {self.permuted}")

    def pool(self) -> tuple[Pool, int]:
        """Return all images, training before test images, and the number of training images."""
        if self.folder is None:
            return _pool(self.source, self.source.place(), own=True)
        named = Path(self.folder).expanduser()
        inside = data_folder() / self.folder
        return _pool(self.source, inside if not named.is_dir() and inside.is_dir() else named, own=False)

    def federation(self, seed: int) -> Federation:
        """Split the data among the clients; the federations of all seeds share the memory of the images."""
        pool, split = self.pool()
        labels = pool.y.numpy()
        train, test = labels[:split], labels[split:]
        parts = self.parts(train, seed)
        if self.samples is not None:
            parts = [limited(part, train, self.samples, seed, k) for k, part in enumerate(parts)]
        tests = [with_same_mix(part, train, test, self.test_samples, seed, k) + split for k, part in enumerate(parts)]
        made = Federation.from_partition(
            pool,
            parts,
            priority=[k < self.priority for k in range(self.clients)],
            test_parts=tests,
            heldout_fraction=self.heldout_fraction,
            seed=seed,
        )
        if self.rotations is not None:
            made = changed(made, rotations(made, self.rotations))
        return changed(made, permutations(made, self.permuted, seed)) if self.permuted else made

    def parts(self, labels: Labels, seed: int) -> list[Rows]:
        """Return the rows of the training split that each client gets."""
        if self.partition == "dirichlet":
            return dirichlet(labels, self.clients, self.alpha, seed)
        if self.partition == "iid":
            return iid(labels, self.clients, seed)
        if self.partition == "sizes":
            return by_sizes(labels, self.sizes or [], seed)
        needed = self.shards if self.replacement else self.clients * self.shards
        most = largest_shard(np.bincount(labels).tolist(), needed)
        size = most if self.shard_size is None else min(self.shard_size, most)
        if self.shard_size is not None and size < self.shard_size and size:
            warnings.warn(
                f"the data has {needed} single-class shards of at most {size} samples, not {self.shard_size}: "
                f"each shard gets {size}",
                FederationWarning,
                stacklevel=2,
            )
        return shards(labels, self.clients, self.shards, max(size, 1), replacement=self.replacement, seed=seed)


@functools.lru_cache(maxsize=2)
def _pool(source: Source, folder: Path, *, own: bool) -> tuple[Pool, int]:
    """Read the images once, so that all federations over them share one pool."""
    if own:
        splits = source.load()
    else:
        splits = read_idx_folder(folder)
        check_splits(splits, source.classes, folder)
    if source.transposed:
        splits = Splits(splits.x.swapaxes(1, 2), splits.y, splits.x_test.swapaxes(1, 2), splits.y_test)
    x = torch.from_numpy(np.concatenate([splits.x, splits.x_test]))
    y = torch.from_numpy(np.concatenate([splits.y, splits.y_test]).astype(np.int64))
    if x.dim() == 3:
        x = x.unsqueeze(1)  # one channel
    return Pool(x, y, source.mean, source.std), len(splits.y)


class Idx(ImageData):
    """The user's own images, as four idx files in ``folder``."""

    source = Source("idx", "idx files", ".", 256, (0, 0), (), lambda source, folder: read_idx_folder(folder), ())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folder is None:
            raise FedalignError('data.folder must name the folder of the idx files, with data.kind = "idx"')


class FashionMnist(ImageData):
    """Settings of a federation over Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017, arXiv:1708.07747)."""

    source = SOURCES["fmnist"]


class Emnist(ImageData):
    """Settings of a federation over balanced EMNIST (Cohen, Afshar, Tapson, van Schaik, 2017, arXiv:1702.05373)."""

    source = SOURCES["emnist"]


class Cifar10(ImageData):
    """Settings of a federation over CIFAR-10 (Krizhevsky, 2009)."""

    source = SOURCES["cifar10"]
