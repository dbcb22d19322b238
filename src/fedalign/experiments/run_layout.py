"""Where the runs of an output folder are: an experiment's by arm and seed, that of Flower in the folder itself."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.experiments.store import RunStore

Stores = dict[str, dict[int, RunStore]]
_OF_A_RUN = ("rounds.jsonl", "clients.json", "diverged.json", "stopped.json")


@dataclass(frozen=True)
class RunLayout:
    """The settings of an output folder, and where its runs are. A run over Flower has one arm and one seed.

    >>> flower = {"rule": "fedalign", "seed": 7, "rounds": 50, "warmup": 0.1, "roster": "roster.toml"}
    >>> layout = RunLayout.of(Path("out"), flower)
    >>> layout.settings["arms"], layout.settings["seeds"], layout.home("fedalign", 7)
    (['fedalign'], [7], PosixPath('out'))
    """

    folder: Path
    settings: dict[str, Any]
    single: bool = False

    @classmethod
    def read(cls, folder: Path) -> RunLayout:
        """Read a folder's ``config.toml``.

        Raises :class:`FedalignError` if it is missing or damaged, or if the folder holds something else than runs.
        """
        path = folder / "config.toml"
        if not path.is_file():
            raise FedalignError(f"{folder} is not a run's folder: it has no config.toml")
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FedalignError(f"{folder} is damaged: {type(error).__name__}: {error}") from error
        return cls.of(folder, settings)

    @classmethod
    def of(cls, folder: Path, settings: dict[str, Any]) -> RunLayout:
        """Tell the layout by the settings; those of a run over Flower become an experiment of one arm and one seed."""
        if "sweep" in settings or "redteam" in settings:
            kind = "sweep" if "sweep" in settings else "redteam"
            raise FedalignError(f"{folder} holds no run but a {kind}: its figures are in {kind}.csv and {kind}.json")
        if "arms" in settings:
            return cls(folder, settings)
        if "roster" not in settings or "rule" not in settings:
            raise FedalignError(
                f"{folder} holds a single run of fa.simulate, and a report compares the arms of an experiment "
                "(fa.run, fedalign run) or shows a run over Flower"
            )
        own = settings.get("arm") or settings["rule"]  # a text, or a table as [arm.NAME] of experiments
        table = own if isinstance(own, dict) else {"rule": own}
        one_run = {
            "description": "A federation over Flower.",
            "seeds": [settings.get("seed", 0)],
            "device": settings.get("device", "cpu"),
            **settings,
            "name": settings.get("name") or folder.resolve().name,
            "arms": [table["rule"]],
            "arm": {table["rule"]: table},
        }
        return cls(folder, one_run, single=True)

    def home(self, arm: str, seed: int) -> Path:
        """Return the folder of one run."""
        return self.folder if self.single else self.folder / arm / f"seed-{seed}"

    def stores(self, arms: Iterable[str], seeds: Iterable[int]) -> Stores:
        """Return what reads each run, by arm, then seed."""
        numbers = list(seeds)
        return {arm: {seed: RunStore(self.home(arm, seed)) for seed in numbers} for arm in arms}

    def files(self) -> list[Path]:
        """Return the files of runs that change while they go on."""
        if self.single:
            return [path for name in _OF_A_RUN if (path := self.folder / name).exists()]
        return sorted(self.folder.glob("*/seed-*/*.json*"))
