"""Reads a user's TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError


def read_toml(path: Path) -> dict[str, Any]:
    """Return the table of a TOML file; raises :class:`FedalignError` if it cannot be read or is not valid TOML.

    >>> read_toml(Path("missing.toml"))
    Traceback (most recent call last):
    fedalign.errors.FedalignError: cannot read missing.toml: No such file or directory
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FedalignError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedalignError(f"{path} is not valid TOML: {error}") from error
