"""The data sets that an experiment can use, for ``fedalign list`` and ``fedalign data``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from fedalign.data.image_sets import SOURCES
from fedalign.data.source import Source
from fedalign.errors import FedalignError


class DataSet(Protocol):
    """The interface of a data set that the commands use."""

    def describe(self) -> str:
        """Return one line: what the data set is, and whether its files are available."""
        ...

    def available(self) -> bool:
        """Tell whether the files of the data set exist; their content is not checked."""
        ...

    def get(self, console: Console) -> list[Path]:
        """Download the files that are missing, and return their paths."""
        ...

    def check(self) -> str:
        """Verify the files and return one line that says so; a :class:`FedalignError` names what is wrong."""
        ...


@dataclass(frozen=True)
class NothingToGet:
    """A data set without official files: generated, or the user's own."""

    text: str

    def describe(self) -> str:
        """Return the description that the data set was made with."""
        return self.text

    def available(self) -> bool:
        """Return True: there are no files that could be missing."""
        return True

    def get(self, console: Console) -> list[Path]:
        """Return an empty list: there is nothing to download."""
        return []

    def check(self) -> str:
        """Return the description: there is nothing to verify."""
        return self.text


@dataclass(frozen=True)
class Downloadable:
    """A data set whose official files can be downloaded."""

    source: Source

    def describe(self) -> str:
        """Return one line: what the data set is, and where it is or how to download it."""
        source = self.source
        found = source.available()
        where = f"available in {source.place()}" if found else f"not downloaded: fedalign data get {source.name}"
        return f"{source.title}, {source.counts[0]:,} training and {source.counts[1]:,} test images; {where}"

    def available(self) -> bool:
        """Tell whether the files of the data set exist; their content is not checked."""
        return self.source.available()

    def get(self, console: Console) -> list[Path]:
        """Download the official files unless the data set is complete in some form, then verify it."""
        from fedalign.data.download import get

        files = [] if self.source.available() else get(self.source, console)
        self.source.load()
        return files

    def check(self) -> str:
        """Read and verify all files."""
        if not self.source.available():
            raise FedalignError(
                f"{self.source.name} is not in {self.source.place()}: fedalign data get {self.source.name}"
            )
        self.source.load()
        return f"{self.source.title}: complete and verified, in {self.source.place()}"


DATASETS: dict[str, DataSet] = {
    "synth": NothingToGet(
        "Synth(α,β) of FedProx, with FedALIGN's noisy free clients; generated from the seed, nothing to download"
    ),
    **{name: Downloadable(source) for name, source in SOURCES.items()},
    "idx": NothingToGet("your own images as four idx files in data.folder; nothing to download"),
    "folder": NothingToGet("your own .npz files, one for each client, in data.folder; nothing to download"),
}
