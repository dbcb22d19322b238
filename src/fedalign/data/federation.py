"""A federation: clients with training, held-out and test parts of one pool of samples."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedalign.data.client import Client, check_counts, names_of
from fedalign.data.clients import Reading, read_clients
from fedalign.data.folder import read_folder
from fedalign.data.join import join
from fedalign.data.roles import priority_flags
from fedalign.data.rows import Rows, as_rows, hold_out, set_aside
from fedalign.data.samples import Arrays, Pool, as_tensors, check_alike
from fedalign.errors import FedalignError, FederationWarning
from fedalign.protocol.roster import Roster

__all__ = ["Client", "Federation", "Rows"]

Priority = Sequence[bool] | Sequence[str] | str  #: a flag for each client, or the names of the priority clients


class Federation:
    """Clients over a pool of samples. Make one with a method ``from_…``.

    >>> x, y = torch.randn(30, 4), torch.arange(30) % 3
    >>> fed = Federation.from_arrays([(x[:20], y[:20]), (x[20:], y[20:])], priority=[True, False])
    >>> fed
    Federation(2 clients, 1 priority, 24 training and 6 held-out samples)
    >>> fed.p.tolist()
    [1.0, 0.5]
    """

    def __init__(self, pool: Pool, clients: Sequence[Client]) -> None:
        self.pool = pool
        self.clients = tuple(clients)
        if not self.clients:
            raise FedalignError("the federation has no clients")
        self.roster = Roster(
            tuple(c.name for c in clients),
            tuple(c.priority for c in clients),
            tuple(len(c.train) for c in clients),
        )
        for client in self.clients:
            if not len(client.train):
                raise FedalignError(f"client {client.name!r} has no training samples; leave it out or give it some")
        if all(self.roster.priority):
            warnings.warn(
                f"all {len(self.clients)} clients are priority clients: there are no free clients to admit, "
                "so every rule equals FedAvg on all clients",
                FederationWarning,
                stacklevel=3,
            )

    def __repr__(self) -> str:
        train = sum(len(c.train) for c in self.clients)
        held = sum(len(c.heldout) for c in self.clients)
        return (
            f"Federation({len(self)} clients, {sum(self.roster.priority)} priority, "
            f"{train} training and {held} held-out samples)"
        )

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def p(self) -> npt.NDArray[np.float64]:
        """The weights ``p_k = D_k / Σ_{i∈P} D_i`` of all clients."""
        return self.roster.p

    @cached_property
    def has_heldout(self) -> bool:
        """Whether every client has held-out data."""
        return all(len(c.heldout) for c in self.clients)

    @cached_property
    def has_test(self) -> bool:
        """Whether some priority client has test data."""
        return any(len(c.test) for c in self.clients if c.priority)

    @classmethod
    def from_arrays(
        cls,
        train: Sequence[Arrays],
        heldout: Sequence[Arrays] | None = None,
        test: Sequence[Arrays | None] | None = None,
        *,
        priority: Priority,
        heldout_fraction: float = 0.2,
        test_fraction: float = 0.0,
        seed: int = 0,
        names: Sequence[str] | None = None,
        mean: float | tuple[float, ...] = 0.0,
        std: float | tuple[float, ...] = 1.0,
        classes: tuple[str, ...] | None = None,
    ) -> Federation:
        """Make a federation from each client's ``(x, y)``.

        ``priority`` has a flag for each client, or names the priority clients. Without ``heldout``, a stratified
        ``heldout_fraction`` of each client's samples is held out. With a fraction of 0 nothing is held out, and clients
        are matched on their training data. Without ``test``, ``test_fraction`` of the samples are kept for testing.
        Labels that are texts become class numbers, in alphabetical order; ``pool.classes`` has their names.
        """
        names = names_of(names, len(train))
        check_counts(len(train), heldout_sets=heldout, test_sets=test, names=names)
        joined = join(names, train, heldout, test)
        return cls.from_partition(
            Pool(joined.x, joined.y, mean, std, joined.classes if classes is None else classes),
            parts=joined.train,
            heldout_parts=joined.heldout or None,
            test_parts=joined.test or None,
            priority=priority,
            heldout_fraction=heldout_fraction,
            test_fraction=test_fraction,
            seed=seed,
            names=names,
        )

    @classmethod
    def from_partition(
        cls,
        pool: Pool | Arrays,
        parts: Sequence[npt.ArrayLike],
        *,
        priority: Priority,
        test: Arrays | None = None,
        heldout_parts: Sequence[npt.ArrayLike] | None = None,
        test_parts: Sequence[npt.ArrayLike] | None = None,
        heldout_fraction: float = 0.2,
        test_fraction: float = 0.0,
        seed: int = 0,
        names: Sequence[str] | None = None,
    ) -> Federation:
        """Make a federation from one data set and the rows that belong to each client.

        ``test_parts`` are rows of ``test``, such as an official test split, or else rows of the pool. Federations over
        the same ``Pool`` object share its memory. Arrays may be memory-mapped (``np.load(file, mmap_mode="r")``): on
        the CPU they are then read batch by batch, and need not fit into memory.
        """
        for what, fraction in (("heldout_fraction", heldout_fraction), ("test_fraction", test_fraction)):
            if not 0 <= fraction < 1:
                raise FedalignError(f"{what} must be in [0, 1), not {fraction}")
        if test_fraction and (test is not None or test_parts is not None):
            raise FedalignError("there is test data already; leave test_fraction out")
        pool = pool if isinstance(pool, Pool) else Pool(*as_tensors(pool, "the data"))
        names = names_of(names, len(parts))
        if test is not None:
            x_test, y_test = as_tensors(test, "the test data")
            check_alike((x_test, y_test), (pool.x, pool.y), "the test data", "the training data's")
            shift = len(pool.y)
            x, y = torch.cat([pool.x, x_test]), torch.cat([pool.y, y_test])
            pool = Pool(x, y, pool.mean, pool.std, pool.classes)
            test_parts = [
                as_rows(part, len(y_test), name) + shift for part, name in zip(test_parts or [], names, strict=False)
            ]
        check_counts(len(parts), heldout_parts=heldout_parts, test_parts=test_parts, names=names)
        flags = priority_flags(priority, names)
        clients = []
        labels = pool.y.numpy()
        for k, name in enumerate(names):
            rows = as_rows(parts[k], len(labels), name)
            if not len(rows):
                raise FedalignError(f"client {name!r} has no samples; leave it out or give it some")
            rows, tested = set_aside(rows, labels, test_fraction, seed, k, name)
            if test_parts is not None:
                tested = as_rows(test_parts[k], len(labels), name)
            if heldout_parts is not None:
                kept, held = rows, as_rows(heldout_parts[k], len(labels), name)
                if not len(held):
                    raise FedalignError(
                        f"client {name!r} has an empty held-out set; give it samples, or give no held-out sets at all"
                    )
            else:
                kept, held = hold_out(rows, labels[rows], heldout_fraction, seed, k, name)
            clients.append(Client(name, flags[k], kept, held, tested))
        return cls(pool, clients)

    @classmethod
    def from_clients(
        cls,
        clients: Any,
        *,
        priority: Priority,
        target: str | Sequence[str] | None = None,
        features: Sequence[str] | None = None,
        heldout: Any = None,
        test: Any = None,
        client: str | None = None,
        split: str | None = None,
        **options: Any,
    ) -> Federation:
        """Make a federation from clients' data in any form, by name.

        ``clients`` maps names to data: ``(x, y)``, pandas frames, ``.csv`` or ``.parquet`` files,
        ``torch.utils.data.Dataset`` or Hugging Face ``datasets.Dataset`` objects; or it is a partitioner or a
        ``FederatedDataset`` of ``flwr_datasets``; or one table, in which the column ``client`` tells clients apart. A
        client's data may also be a mapping with ``train``, ``heldout`` (or ``validation``) and ``test``.
        ``target`` names the column of labels (several make a multi-label task), ``features`` the columns to train on
        (all others, if not given), ``split`` a column that says ``train``, ``heldout`` or ``test``. ``heldout`` and
        ``test`` hold further samples in the same forms. ``options`` are those of :meth:`from_arrays`.

        >>> import pandas as pd
        >>> ages = pd.DataFrame({"age": range(40), "risk": ["low", "high"] * 20})
        >>> fed = Federation.from_clients({"a": ages[:20], "b": ages[20:]}, target="risk", priority=["a"])
        >>> fed.pool.classes
        ('high', 'low')
        """
        parts = read_clients(clients, Reading(target, features, split), heldout, test, client)
        return cls.from_arrays(**parts.arguments(), priority=priority, **options)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        priority: Sequence[str] | str | None = None,
        target: str | Sequence[str] | None = None,
        features: Sequence[str] | None = None,
        client: str | None = None,
        split: str | None = None,
        **options: Any,
    ) -> Federation:
        """Make a federation from a folder of ``NAME.npz``, ``NAME.csv`` or ``NAME.parquet`` files, one for each client.

        An ``.npz`` file holds ``x`` and ``y``. It may also hold ``x_heldout`` and ``y_heldout``, ``x_test`` and
        ``y_test``, and ``priority`` (true or false). Tables need a ``target`` column. Sub-folders ``test`` and
        ``heldout`` may hold files of the same names. ``priority`` names the priority clients if the files do not.
        ``folder`` may also be one table, with a column ``client``. The other options are those of :meth:`from_clients`.
        """
        reading = Reading(target, features, split)
        if client is not None:
            if priority is None:
                raise FedalignError("a table does not say which clients are priority clients: name them with priority")
            parts = read_clients(Path(folder), reading, client=client)
            return cls.from_arrays(**parts.arguments(), priority=priority, **options)
        parts, flags = read_folder(Path(folder), reading, priority)
        return cls.from_arrays(**parts.arguments(), priority=list(flags.values()), **options)
