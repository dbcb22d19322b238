"""The data sets that experiments can name, as ``fedalign list`` and ``fedalign data`` show them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from fedalign.data.sources import SOURCES, Source
from fedalign.errors import FedalignError


class DataSet(Protocol):
    """What the commands ask of a data set."""

    def describe(self) -> str:
        """Say in a line what it is, and whether its data is at hand."""
        ...

    def at_hand(self) -> bool:
        """Tell whether its files are there."""
        ...

    def get(self, console: Console) -> list[Path]:
        """Download what is missing; give the files."""
        ...

    def check(self) -> str:
        """Verify what is there, and say so in a line; complain of what is wrong."""
        ...


@dataclass(frozen=True)
class NothingToGet:
    """Data that is made, or that the user keeps."""

    text: str

    def describe(self) -> str:
        """Say so."""
        return self.text

    def at_hand(self) -> bool:
        """Say yes."""
        return True

    def get(self, console: Console) -> list[Path]:
        """Get nothing."""
        return []

    def check(self) -> str:
        """Find nothing wrong."""
        return self.text


@dataclass(frozen=True)
class Downloadable:
    """Data with official files."""

    source: Source

    def describe(self) -> str:
        """Say where it is, or how to get it."""
        source = self.source
        where = f"at hand in {source.place()}" if source.at_hand() else f"not at hand: fedalign data get {source.name}"
        return f"{source.title}, {source.counts[0]:,} training and {source.counts[1]:,} test images; {where}"

    def at_hand(self) -> bool:
        """Tell whether its files are there."""
        return self.source.at_hand()

    def get(self, console: Console) -> list[Path]:
        """Download what is missing, unless the data is there in some form already; then verify it."""
        from fedalign.data.download import get

        files = [] if self.source.at_hand() else get(self.source, console)
        self.source.load()
        return files

    def check(self) -> str:
        """Read and verify all of it."""
        if not self.source.at_hand():
            raise FedalignError(f"{self.source.name} is not at hand in {self.source.place()}")
        self.source.load()
        return f"{self.source.title}: complete and right, in {self.source.place()}"


DATASETS: dict[str, DataSet] = {
    "synth": NothingToGet(
        "Synth(α,β) of FedProx, with FedALIGN's noisy free clients; made from the seed, nothing to download: at hand"
    ),
    **{name: Downloadable(source) for name, source in SOURCES.items()},
    "idx": NothingToGet("your own images as four idx files (data.folder names where); nothing to download"),
    "folder": NothingToGet("your own .npz files, one a client (data.folder names where); nothing to download"),
}
