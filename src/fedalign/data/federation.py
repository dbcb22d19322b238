"""A federation: clients with training, held-out and test parts of one pool of samples."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedalign.data.rows import NO_ROWS, Rows, as_rows, hold_out
from fedalign.data.samples import Arrays, Pool, Tensors, as_tensors, check_alike
from fedalign.errors import FedalignError, FederationWarning
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Split

__all__ = ["Client", "Federation", "Rows"]


@dataclass(frozen=True, eq=False)
class Client:
    """A client: its name, its role, and which rows of the pool are its training, held-out and test samples."""

    name: str
    priority: bool
    train: Rows
    heldout: Rows
    test: Rows

    def rows(self, split: Split) -> Rows:
        """Return the rows of one split: ``"train"``, ``"heldout"`` or ``"test"``."""
        return {"train": self.train, "heldout": self.heldout, "test": self.test}[split]


class Federation:
    """Clients over a pool of samples. Make one with :meth:`from_arrays`, :meth:`from_partition` or :meth:`from_folder`.

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
        priority: Sequence[bool],
        heldout_fraction: float = 0.2,
        seed: int = 0,
        names: Sequence[str] | None = None,
        mean: float | tuple[float, ...] = 0.0,
        std: float | tuple[float, ...] = 1.0,
    ) -> Federation:
        """Make a federation from each client's ``(x, y)``.

        Without ``heldout``, a stratified ``heldout_fraction`` of each client's samples is held out. With a fraction of
        0 nothing is held out, and clients are matched on their training data.
        """
        names = [str(name) for name in names] if names is not None else [str(k) for k in range(len(train))]
        for what, given in (
            ("priority flags", priority),
            ("held-out sets", heldout),
            ("test sets", test),
            ("names", names),
        ):
            if given is not None and len(given) != len(train):
                raise FedalignError(f"{len(given)} {what} for {len(train)} clients; there must be one per client")
        parts: list[Tensors] = []
        offset = 0

        def add(arrays: Arrays | None, what: str) -> Rows:
            nonlocal offset
            if arrays is None:
                return NO_ROWS
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
        pool = Pool(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), mean, std)
        return cls.from_partition(
            pool,
            parts=train_rows,
            heldout_parts=held_rows or None,
            test_parts=test_rows or None,
            priority=priority,
            heldout_fraction=heldout_fraction,
            seed=seed,
            names=names,
        )

    @classmethod
    def from_partition(
        cls,
        pool: Pool | Arrays,
        parts: Sequence[npt.ArrayLike],
        *,
        priority: Sequence[bool],
        test: Arrays | None = None,
        heldout_parts: Sequence[npt.ArrayLike] | None = None,
        test_parts: Sequence[npt.ArrayLike] | None = None,
        heldout_fraction: float = 0.2,
        seed: int = 0,
        names: Sequence[str] | None = None,
    ) -> Federation:
        """Make a federation from one data set and the rows that belong to each client.

        ``test_parts`` are rows of ``test``, such as an official test split, or else rows of the pool. Federations over
        the same ``Pool`` object share its memory. Arrays may be memory-mapped (``np.load(file, mmap_mode="r")``): on
        the CPU they are then read batch by batch, and need not fit into memory.
        """
        if not 0 <= heldout_fraction < 1:
            raise FedalignError(f"heldout_fraction must be in [0, 1), not {heldout_fraction}")
        pool = pool if isinstance(pool, Pool) else Pool(*as_tensors(pool, "the data"))
        names = [str(name) for name in names] if names is not None else [str(k) for k in range(len(parts))]
        if test is not None:
            x_test, y_test = as_tensors(test, "the test data")
            check_alike((x_test, y_test), (pool.x, pool.y), "the test data", "the training data's")
            shift = len(pool.y)
            pool = Pool(torch.cat([pool.x, x_test]), torch.cat([pool.y, y_test]), pool.mean, pool.std)
            test_parts = [
                as_rows(part, len(y_test), name) + shift for part, name in zip(test_parts or [], names, strict=False)
            ]
        for what, given in (
            ("priority flags", priority),
            ("held-out parts", heldout_parts),
            ("test parts", test_parts),
            ("names", names),
        ):
            if given is not None and len(given) != len(parts):
                raise FedalignError(f"{len(given)} {what} for {len(parts)} clients; there must be one per client")
        clients = []
        labels = pool.y.numpy()
        for k, name in enumerate(names):
            rows = as_rows(parts[k], len(labels), name)
            if not len(rows):
                raise FedalignError(f"client {name!r} has no samples; leave it out or give it some")
            if heldout_parts is not None:
                kept, held = rows, as_rows(heldout_parts[k], len(labels), name)
                if not len(held):
                    raise FedalignError(
                        f"client {name!r} has an empty held-out set; give it samples, or give no held-out sets at all"
                    )
            else:
                kept, held = hold_out(rows, labels[rows], heldout_fraction, seed, k, name)
            tested = as_rows(test_parts[k], len(labels), name) if test_parts is not None else NO_ROWS
            clients.append(Client(name, bool(priority[k]), kept, held, tested))
        return cls(pool, clients)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        priority: Sequence[str] | None = None,
        heldout_fraction: float = 0.2,
        seed: int = 0,
        mean: float | tuple[float, ...] = 0.0,
        std: float | tuple[float, ...] = 1.0,
    ) -> Federation:
        """Make a federation from a folder of ``NAME.npz`` files, one for each client.

        A file holds ``x`` and ``y``. It may also hold ``x_heldout`` and ``y_heldout``, ``x_test`` and ``y_test``, and
        ``priority`` (true or false). The argument ``priority`` names the priority clients if the files do not.
        """
        from fedalign.data.folder import read_folder

        clients = read_folder(Path(folder), priority)
        held = [c.heldout for c in clients if c.heldout is not None]
        if held and len(held) < len(clients):
            lacking = next(c.name for c in clients if c.heldout is None)
            raise FedalignError(
                f"folder {folder}: some clients have x_heldout, but {lacking!r} has none; give it to all or to none"
            )
        return cls.from_arrays(
            [c.train for c in clients],
            heldout=held or None,
            test=[c.test for c in clients] if any(c.test is not None for c in clients) else None,
            priority=[c.priority for c in clients],
            heldout_fraction=heldout_fraction,
            seed=seed,
            names=[c.name for c in clients],
            mean=mean,
            std=std,
        )
