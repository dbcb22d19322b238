"""Lists the experiments of the paper as jobs to run."""

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
    """One experiment of the paper, and its output folder."""

    experiment: Experiment
    folder: Path

    @property
    def done(self) -> bool:
        """Whether the experiment has finished."""
        return (self.folder / "summary.json").is_file()


def jobs(figures: Sequence[int], folder: Path, overrides: dict[str, Any], emnist: str | None = None) -> list[Job]:
    """List the experiments of some figures, with their output folders in ``folder``.

    ``overrides`` change settings of all experiments; ``emnist`` names a folder of idx files to use in place of EMNIST.
    """
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
