"""``fedalign flower new DIR``: makes a Flower app with a working example, in which users change two functions."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from fedalign.errors import FedalignError


def create(folder: Path) -> list[Path]:
    """Create an app named like its folder, and return the files written.

    Raises :class:`FedalignError` if the folder is not empty or its name cannot be an app's.
    """
    name = folder.resolve().name.lower().replace("_", "-").replace(" ", "-")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise FedalignError(f"the folder's name becomes the app's, so it must be letters, digits and -, not {name!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FedalignError(f"{folder} exists and is not empty; choose another folder")
    package = name.replace("-", "_")
    source = resources.files("fedalign.flower") / "template"
    written = []
    for part in ("pyproject.toml", "README.md", "LICENSE", "client_app.py", "server_app.py", "task.py"):
        target = folder / package / part if part.endswith(".py") else folder / part
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (source / f"{part}.txt").read_text(encoding="utf-8")
        target.write_text(text.replace("APP-NAME", name).replace("APP_PACKAGE", package), encoding="utf-8")
        written.append(target)
    (folder / package / "__init__.py").write_text(f'"""The federation {name}."""\n', encoding="utf-8")
    return [*written, folder / package / "__init__.py"]
