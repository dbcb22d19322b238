"""The data sets that experiments can name."""

from __future__ import annotations

from typing import Protocol


class DataSet(Protocol):
    """What ``fedalign list`` and ``fedalign data`` ask of a data set."""

    def describe(self) -> str:
        """Say in a line what it is, and whether its data is at hand."""
        ...


class Generated:
    """Data made from the seed."""

    def __init__(self, text: str) -> None:
        self._text = text

    def describe(self) -> str:
        """Say so."""
        return f"{self._text}; made from the seed, nothing to download: at hand"


class UserFolder:
    """Data that the user keeps."""

    def describe(self) -> str:
        """Say so."""
        return "your own .npz files, one a client (data.folder names where); nothing to download"


DATASETS: dict[str, DataSet] = {
    "synth": Generated("Synth(α,β) of FedProx, with FedALIGN's noisy free clients"),
    "folder": UserFolder(),
}
