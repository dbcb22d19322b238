"""Who takes part and with what data: clients with train, held-out and test parts of one pool of samples."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedalign.data.samples import Arrays, Pool, Tensors, as_tensors, check_alike
from fedalign.errors import FedalignError, FederationWarning
from fedalign.protocol.roster import Roster
from fedalign.rules.rule import Split
from fedalign.training.randomness import Purpose, permutation

Rows = npt.NDArray[np.int64]
_NO_ROWS: Rows = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Client:
    """A client: its name, its role, and which rows of the pool are its training, held-out and test samples."""

    name: str
    priority: bool
    train: Rows
    heldout: Rows
    test: Rows

    def rows(self, split: Split) -> Rows:
        """Give the rows of one split."""
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
                f"all {len(self.clients)} clients are priority clients: nobody is left to admit, "
                "so every rule is FedAvg on all",
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
        """Weights ``p_k = D_k / Σ_{i∈P} D_i`` of all clients."""
        return self.roster.p

    @cached_property
    def has_heldout(self) -> bool:
        """Whether every client has data to match on that it doesn't train on."""
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
        """Make a federation from each client's ``(x, y)``; without ``heldout``, a stratified part of it is held out.

        ``heldout_fraction=0`` holds nothing out: then clients are matched on their training data.
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
                return _NO_ROWS
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
        """Make a federation from one data set and, for each client, the rows that are its own.

        ``test_parts`` are rows of ``test`` where that is given (as with an official test split), else of the pool.
        Federations over the same ``Pool`` object share its memory. Arrays may be memory-mapped (``np.load(file,
        mmap_mode="r")``): on the CPU they are then read as batches need them, and needn't fit into memory.
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
                _rows(part, len(y_test), name) + shift for part, name in zip(test_parts or [], names, strict=False)
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
            rows = _rows(parts[k], len(labels), name)
            if not len(rows):
                raise FedalignError(f"client {name!r} has no samples; leave it out or give it some")
            if heldout_parts is not None:
                kept, held = rows, _rows(heldout_parts[k], len(labels), name)
                if not len(held):
                    raise FedalignError(
                        f"client {name!r} has an empty held-out set; give it samples or leave heldout out"
                    )
            else:
                kept, held = _hold_out(rows, labels[rows], heldout_fraction, seed, k, name)
            tested = _rows(test_parts[k], len(labels), name) if test_parts is not None else _NO_ROWS
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
        """Make a federation from a folder of ``NAME.npz`` files, one a client.

        A file holds ``x`` and ``y``, and may hold ``x_heldout``/``y_heldout``, ``x_test``/``y_test`` and ``priority``
        (true or false). ``priority`` names the priority clients, if the files don't.
        """
        from fedalign.data.folder import read_folder

        clients = read_folder(Path(folder), priority)
        held = [c.heldout for c in clients if c.heldout is not None]
        if held and len(held) < len(clients):
            lacking = next(c.name for c in clients if c.heldout is None)
            raise FedalignError(f"folder {folder}: some clients have x_heldout, {lacking!r} has none; all or none must")
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


def _hold_out(
    rows: Rows, labels: npt.NDArray[Any], fraction: float, seed: int, client: int, name: str
) -> tuple[Rows, Rows]:
    """Split a client's rows, class by class, into training and held-out rows; both keep their order.

    Counts per class are rounded by largest remainder, so that they add up to the rounded total: at least one sample
    is held out and at least one is left. A client with a single sample matches on that one.
    """
    if fraction == 0:
        return rows, _NO_ROWS
    if len(rows) == 1:
        warnings.warn(
            f"client {name!r} has one sample: it is trained on and matched on",
            FederationWarning,
            stacklevel=4,
        )
        return rows, rows
    total = min(max(1, int(fraction * len(rows) + 0.5)), len(rows) - 1)
    if np.issubdtype(labels.dtype, np.floating):
        groups = np.zeros(len(rows), np.int64)
    else:
        groups = np.unique(labels.reshape(len(rows), -1), axis=0, return_inverse=True)[1].reshape(-1)
    sizes = np.bincount(groups)
    quota = sizes * (total / len(rows))
    counts = np.floor(quota).astype(np.int64)
    by_remainder = np.argsort(counts - quota, kind="stable")
    counts[by_remainder[: total - counts.sum()]] += 1
    order = permutation(len(rows), seed, Purpose.SPLIT, client)
    taken = np.zeros(len(rows), bool)
    for group, count in enumerate(counts):
        taken[order[groups[order] == group][:count]] = True
    return rows[~taken], rows[taken]


def _rows(part: npt.ArrayLike, size: int, name: str) -> Rows:
    """Read a client's rows: whole numbers, or a mask over all samples."""
    given = np.asarray(part)
    if given.dtype == bool:
        if given.shape != (size,):
            raise FedalignError(f"client {name!r}: a mask must have one entry per sample ({size}), not {given.shape}")
        given = np.flatnonzero(given)
    if given.size and not np.issubdtype(given.dtype, np.integer):
        raise FedalignError(f"client {name!r}: rows must be whole numbers, not {given.dtype}")
    rows = given.astype(np.int64).reshape(-1)
    outside = rows[(rows < 0) | (rows >= size)]
    if len(outside):
        raise FedalignError(f"client {name!r}: row {int(outside[0])} is outside the data's {size} samples")
    return rows
