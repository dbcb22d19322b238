"""The hash of a Flower app, by which a node's owner allows it."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

from fedalign.errors import FedalignError


def app_hash(app: Path) -> str:
    """Return the SHA-256 of an app's bundle, given its folder or the ``.fab`` file that ``flwr build`` wrote.

    Flower builds the same bundle from the same files, so whoever has them can check the hash. Raises
    :class:`FedalignError` for anything that is not an app.
    """
    return hashlib.sha256(app_bundle(app)).hexdigest()


def app_bundle(app: Path) -> bytes:
    """Return the bundle that ``flwr run`` sends, given an app's folder or the ``.fab`` file."""
    from flwr.cli.build import build_fab_from_disk

    if app.is_file() and app.suffix == ".fab":
        return app.read_bytes()
    if not (app / "pyproject.toml").is_file():
        raise FedalignError(f"{app} is not a Flower app: it has no pyproject.toml")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of what Flower uses
            return build_fab_from_disk(app)
    except (ValueError, OSError) as error:
        raise FedalignError(f"{app} is not a Flower app: {error}") from error
