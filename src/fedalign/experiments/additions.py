"""Arms and seeds that a resume adds to an output folder; what is there already is not run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.experiments.config_file import read_settings


def seed_list(setting: int | Sequence[int]) -> list[int]:
    """List the seeds that the setting ``seeds`` means: a number of them, counted from 0, or the seeds themselves.

    >>> seed_list(3), seed_list([3, 4])
    ([0, 1, 2], [3, 4])
    """
    return list(range(setting)) if isinstance(setting, int) else list(setting)


def seeds_setting(seeds: Sequence[int]) -> int | list[int]:
    """Write seeds as settings do, as a number where they are counted from 0.

    >>> seeds_setting([0, 1, 2]), seeds_setting([3, 4])
    (3, [3, 4])
    """
    return len(seeds) if list(seeds) == list(range(len(seeds))) else list(seeds)


def read_seeds(text: str) -> int | list[int]:
    """Read the option ``--seeds``: ``5`` is a number of seeds, ``3,4`` are seeds, and so is ``3,`` alone.

    >>> read_seeds("5"), read_seeds("3,4"), read_seeds("3,")
    (5, [3, 4], [3])
    """
    words = [word.strip() for word in text.split(",")]
    try:
        numbers = [int(word) for word in words if word]
    except ValueError:
        numbers = []
    if not numbers:
        raise FedalignError(f"give a number of seeds (5), or seeds (3,4; or 3, for seed 3 alone), not {text!r}")
    return numbers[0] if "," not in text else numbers


def joined(before: Mapping[str, Any], arms: Sequence[str] | None, seeds: int | Sequence[int] | None) -> dict[str, Any]:
    """Return the settings ``arms`` and ``seeds`` of a folder with those that are asked for added, in order.

    >>> joined({"arms": ["all"], "seeds": 2}, ["auto", "all"], [0, 7])
    {'arms': ['all', 'auto'], 'seeds': [0, 1, 7]}
    """
    held, numbers = list(before["arms"]), seed_list(before["seeds"])
    numbers += [seed for seed in seed_list(seeds or []) if seed not in numbers]
    return {"arms": held + [arm for arm in arms or [] if arm not in held], "seeds": seeds_setting(numbers)}


def with_additions(folder: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides of a resume, with the folder's arms and seeds and those that are asked for besides.

    They are returned as they are if the folder holds no run that can be continued; the resume says what is wrong.
    """
    if not (folder / "config.toml").exists():
        return dict(overrides)
    before = read_settings(folder)
    if "arms" not in before or "seeds" not in before:
        return dict(overrides)
    return {**overrides, **joined(before, overrides.get("arms"), overrides.get("seeds"))}


def without_additions(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Leave the arms and seeds out of settings that an earlier run did not have, to compare the rest with it.

    >>> without_additions({"arms": ["all"], "seeds": 2}, {"arms": ["all", "auto"], "seeds": 3, "rounds": 5})
    {'arms': ['all'], 'seeds': 2, 'rounds': 5}
    """
    rest = dict(now)
    if set(before["arms"]) <= set(now["arms"]):
        rest["arms"] = before["arms"]
    if set(seed_list(before["seeds"])) <= set(seed_list(now["seeds"])):
        rest["seeds"] = before["seeds"]
    if "arm" in now:  # sections of arms that the run did not have
        held = before.get("arm", {})
        tables = {arm: table for arm, table in now["arm"].items() if arm in held or arm in before["arms"]}
        rest["arm"] = tables
    return rest
