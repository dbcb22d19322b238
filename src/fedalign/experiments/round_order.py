"""Notices when rounds of a log are repeated or missing, as they are when two processes have written it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedalign.errors import FedalignError


def rounds_in(log: Path) -> list[int]:
    """Read the numbers of the rounds in a log up to the first line that is damaged; nothing without a log."""
    rounds: list[int] = []
    for line in log.read_bytes().split(b"\n")[:-1] if log.exists() else []:
        try:
            rounds.append(int(json.loads(line)["round"]))
        except (ValueError, KeyError, TypeError):
            break
    return rounds


def check_order(log: Path, rounds: Sequence[int]) -> None:
    """Refuse rounds that are not 0, 1, 2 and so on; the :class:`FedalignError` says what to do.

    >>> check_order(Path("a/seed-0/rounds.jsonl"), [0, 1, 1])
    Traceback (most recent call last):
    fedalign.errors.FedalignError: a/seed-0/rounds.jsonl repeats round 1 (line 3), so its figures cannot be trusted; \
delete the folder a/seed-0 and continue with --resume, which does that run again
    """
    for expected, found in enumerate(rounds):
        if found != expected:
            wrong = f"repeats round {found}" if found < expected else f"lacks round {expected}"
            raise FedalignError(
                f"{log} {wrong} (line {expected + 1}), so its figures cannot be trusted; delete the folder "
                f"{log.parent} and continue with --resume, which does that run again"
            )


def check_length(log: Path, rounds: int, known: int) -> None:
    """Refuse a log of ``rounds`` rounds if a checkpoint was written after ``known`` of them."""
    if rounds < known:
        raise FedalignError(
            f"{log} lacks round {rounds} and all later ones, although there is a checkpoint of round {known - 1}; "
            "continue with --resume, which does them again"
        )
