"""Where an experiment's federations come from: the interface of ``[data]`` kinds, and a folder of the user's own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

from fedalign.data.federation import Federation
from fedalign.errors import FedalignError


@runtime_checkable
class FederationSource(Protocol):
    """Anything that makes a federation from a seed."""

    def federation(self, seed: int) -> Federation:
        """Make the federation of a seed, the same one whenever it is asked."""


@dataclass(frozen=True)
class Folder:
    """Data from a folder of ``.npz``, ``.csv`` or ``.parquet`` files, one for each client.

    :meth:`fedalign.Federation.from_folder` says what the options mean.
    """

    folder: str
    priority: str | list[str] | None = None
    target: str | list[str] | None = None
    features: list[str] | None = None
    client: str | None = None
    split: str | None = None
    heldout_fraction: float = 0.2
    test_fraction: float = 0.0
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0

    def federation(self, seed: int) -> Federation:
        """Read the folder; the seed chooses the samples that are held out."""
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "folder"}
        return Federation.from_folder(self.folder, seed=seed, **options)


def federation_of(source: Any, seed: int, kind: str) -> Federation:
    """Ask a source, or a function of the seed, for a federation; refuse anything else that comes back.

    >>> federation_of(lambda seed: "a list", 0, "mine:data")
    Traceback (most recent call last):
    fedalign.errors.FedalignError: data.kind is 'mine:data', which gave a str for seed 0, not a fedalign.Federation
    """
    made = source.federation(seed) if isinstance(source, FederationSource) else source(seed)
    if not isinstance(made, Federation):
        raise FedalignError(
            f"data.kind is {kind!r}, which gave a {type(made).__name__} for seed {seed}, not a fedalign.Federation"
        )
    return made
