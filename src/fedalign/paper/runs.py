"""The paper's experiments as a list of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.experiments.config import Experiment, load
from fedalign.paper.figures import FIGURES


@dataclass(frozen=True)
class Job:
    """One experiment of the paper, and the folder it is run into."""

    experiment: Experiment
    folder: Path

    @property
    def done(self) -> bool:
        """Whether it has been run to its end."""
        return (self.folder / "summary.json").is_file()


def jobs(figures: Sequence[int], folder: Path, overrides: dict[str, Any], emnist: str | None = None) -> list[Job]:
    """List the experiments of some figures. ``emnist`` names idx files to use in place of EMNIST's own."""
    unknown = [number for number in figures if number not in FIGURES]
    if unknown:
        raise FedalignError(f"the paper has no figure {unknown[0]}; there are {', '.join(map(str, FIGURES))}")
    found = []
    for number in figures:
        for name in FIGURES[number].experiments:
            settings: dict[str, Any] = {"arms": list(FIGURES[number].arms), **overrides}
            if emnist is not None and "emnist" in name:
                settings["data.folder"] = emnist
            found.append(Job(load(name, settings), folder / name))
    return found
