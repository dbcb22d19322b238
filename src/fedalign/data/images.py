"""Federations over an image data set: how its samples are dealt out, and each client's test set."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from fedalign.data.federation import Federation
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
from fedalign.data.sources import SOURCES, Source, Splits, check_splits, data_folder, read_idx_folder
from fedalign.errors import FedalignError, FederationWarning


@dataclass(frozen=True)
class ImageData:
    """Settings of a federation over images; :meth:`federation` deals the data out by a seed.

    The first ``priority`` clients are the priority clients; who gets what is drawn, so that is no order.
    """

    source: ClassVar[Source]
    clients: int = 60
    priority: int = 2  #: how many of the clients are priority clients
    partition: Literal["shards", "dirichlet", "iid", "sizes"] = "shards"
    shards: int = 2  #: single-class shards a client
    shard_size: int | None = None  #: samples a shard, at most (default: as many as go round)
    replacement: bool = False  #: whether a shard may go to several clients
    alpha: float = 0.5  #: of the Dirichlet distribution
    sizes: list[int] | None = None  #: each client's samples, for partition = "sizes"
    samples: int | None = None  #: keep at most so many of a client's samples, held-out ones included
    test_samples: int | None = 1000  #: a client's test samples, at most
    heldout_fraction: float = 0.2
    folder: str | None = None  #: other idx files in place of the data set's own: a folder, or its name in FEDALIGN_DATA

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

    def pool(self) -> tuple[Pool, int]:
        """Give all images, training before test, and how many are for training."""
        if self.folder is None:
            return _pool(self.source, self.source.place(), own=True)
        named = Path(self.folder).expanduser()
        inside = data_folder() / self.folder
        return _pool(self.source, inside if not named.is_dir() and inside.is_dir() else named, own=False)

    def federation(self, seed: int) -> Federation:
        """Deal the data out. All seeds share the images' memory."""
        pool, split = self.pool()
        labels = pool.y.numpy()
        train, test = labels[:split], labels[split:]
        parts = self.parts(train, seed)
        if self.samples is not None:
            parts = [limited(part, train, self.samples, seed, k) for k, part in enumerate(parts)]
        tests = [with_same_mix(part, train, test, self.test_samples, seed, k) + split for k, part in enumerate(parts)]
        return Federation.from_partition(
            pool,
            parts,
            priority=[k < self.priority for k in range(self.clients)],
            test_parts=tests,
            heldout_fraction=self.heldout_fraction,
            seed=seed,
        )

    def parts(self, labels: Labels, seed: int) -> list[Rows]:
        """Choose each client's rows of the training split."""
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
                f"shards hold {size}",
                FederationWarning,
                stacklevel=2,
            )
        return shards(labels, self.clients, self.shards, max(size, 1), replacement=self.replacement, seed=seed)


@functools.lru_cache(maxsize=2)
def _pool(source: Source, folder: Path, *, own: bool) -> tuple[Pool, int]:
    """Read images once; every federation over them shares the pool."""
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
    """Images of the user's own, as four idx files in ``folder``."""

    source = Source("idx files", ".", 256, (0, 0), (), lambda source, folder: read_idx_folder(folder), ())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folder is None:
            raise FedalignError('data.folder must name the folder of the idx files, with data.kind = "idx"')


class FashionMnist(ImageData):
    """Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017, arXiv:1708.07747)."""

    source = SOURCES["fmnist"]


class Emnist(ImageData):
    """EMNIST, balanced split (Cohen, Afshar, Tapson and van Schaik, 2017, arXiv:1702.05373)."""

    source = SOURCES["emnist"]


class Cifar10(ImageData):
    """CIFAR-10 (Krizhevsky, 2009)."""

    source = SOURCES["cifar10"]
