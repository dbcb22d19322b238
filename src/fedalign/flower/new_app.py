"""``fedalign flower new DIR``: makes a Flower app, with a working example or for an experiment.

Users change two functions of the example. ``--from`` writes the settings of an experiment into the app.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from datetime import date, time
from importlib import resources
from pathlib import Path
from pprint import pformat
from typing import Any

from fedalign.errors import FedalignError
from fedalign.experiments.experiment import Experiment
from fedalign.flower.flat_local import LOCAL_KEYS
from fedalign.flower.from_experiment import check_personal_methods, choose_arm, run_settings
from fedalign.flower.run_config import flat, in_line, key_in_line
from fedalign.settings.user_modules import loaded

_CONFIG = "[tool.flwr.app.config]\n"
_DATES, _NUMBERS = "import datetime\n", "from math import inf, nan\n"


def create(folder: Path, experiment: Experiment | None = None, arm: str | None = None) -> list[Path]:
    """Create an app named like its folder, and return the files written.

    With an experiment, the app has the settings of one of its arms, its data until you change them, and the modules
    beside its file that it names. Raises :class:`FedalignError` if the folder is not empty, its name cannot be an
    app's, or the experiment can only be simulated.
    """
    name = folder.resolve().name.lower().replace("_", "-").replace(" ", "-")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise FedalignError(f"the folder's name becomes the app's, so it must be letters, digits and -, not {name!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FedalignError(f"{folder} exists and is not empty; choose another folder")
    package = name.replace("-", "_")
    source = resources.files("fedalign.flower") / "template"
    parts = ("pyproject.toml", "README.md", "LICENSE", "client_app.py", "server_app.py", "task.py")
    words = {"APP-NAME": name, "APP_PACKAGE": package}
    texts = {part: _filled((source / f"{part}.txt").read_text(encoding="utf-8"), words) for part in parts}
    if experiment is not None:
        chosen = choose_arm(experiment.settings, arm)
        check_personal_methods(experiment.personal(chosen))
        settings = run_settings(experiment.settings, chosen, experiment.folder)
        if experiment.folder is not None and any(parts[0] == package for parts in _modules(experiment.folder)):
            raise FedalignError(f"the app would have the name of your module {package!r}; choose another folder")
        texts["pyproject.toml"] = _with_settings(texts["pyproject.toml"], settings)
        task = (source / "experiment_task.py.txt").read_text(encoding="utf-8")
        table = _data(experiment)
        words = {"DATA-TABLE": pformat(table, sort_dicts=False, width=100), "SEED": str(settings["seed"])}
        texts["task.py"] = _filled(task, words).replace("# IMPORTS\n", _imports(table), 1)
    texts["__init__.py"] = f'"""The federation {name}."""\n'
    written = []
    for part, text in texts.items():
        target = folder / package / part if part.endswith(".py") else folder / part
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        written.append(target)
    return [
        *written,
        *(_copy_modules(experiment.folder, folder) if experiment is not None and experiment.folder else ()),
    ]


def _filled(template: str, words: Mapping[str, str]) -> str:
    """Put values into the places of a template in one pass: a value may look like the name of another place.

    >>> _filled("folder = A, seed = B", {"A": "data/B", "B": "7"})
    'folder = data/B, seed = 7'
    """
    return re.sub("|".join(map(re.escape, words)), lambda found: words[found[0]], template)


def _imports(table: Any) -> str:
    """Return the imports that the values of a table need where they are written as Python."""
    if isinstance(table, Mapping | list):
        found = "".join(map(_imports, table.values() if isinstance(table, Mapping) else table))
        return "".join(line for line in (_DATES, _NUMBERS) if line in found)
    if isinstance(table, date | time):
        return _DATES
    return _NUMBERS if isinstance(table, float) and not math.isfinite(table) else ""


def _with_settings(template: str, settings: Mapping[str, Any]) -> str:
    """Put an experiment's settings into an app's ``pyproject.toml``, before those that only a deployment has."""
    head, lines = template.split(_CONFIG)
    replaced = {"model", "rule", *LOCAL_KEYS, *(key.partition(".")[0] for key in settings)}
    kept = [line for line in lines.splitlines() if line.split(" ")[0].replace("-", "_") not in replaced]
    own = [f"{key_in_line(key)} = {in_line(value)}" for key, value in flat(settings).items()]
    return head + _CONFIG + "\n".join([*own, *kept]) + "\n"


def _data(experiment: Experiment) -> dict[str, Any]:
    table = dict(experiment.settings["data"])
    if isinstance(table.get("folder"), str):
        folder = Path(table["folder"]).expanduser()
        # A folder of images may also be a name in FEDALIGN_DATA, which stays as it is.
        if table["kind"] == "folder" or folder.is_dir():
            table["folder"] = str(folder.resolve())
    return table


def _modules(home: Path) -> dict[tuple[str, ...], Path]:
    """Return the files of the user's modules from beside the experiment's file, by the parts of their paths there."""
    files = [Path(str(module.__file__)).resolve() for module in loaded()]
    home = home.resolve()
    return {path.relative_to(home).with_suffix("").parts: path for path in files if path.is_relative_to(home)}


def _copy_modules(home: Path, folder: Path) -> list[Path]:
    """Copy the user's modules, so that the app finds them under their names."""
    copied = []
    for path in _modules(home).values():
        target = folder / path.relative_to(home.resolve())
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        copied.append(target)
    return copied
