"""Users' own modules, named ``package.module:Name`` in settings: loaded from beside the settings file, or by import.

A module beside the file is loaded by its location, so it never hides a module of the standard library. It is put into
``sys.modules``, and its folder at the end of ``sys.path``, so that pickling and Ray's workers find it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from fedalign.errors import FedalignError, nearest

_loaded: dict[Path, dict[str, ModuleType]] = {}  # by the file that was loaded: the module and its submodules
_named: set[str] = set()  # users' modules that settings have named
_appended: set[Path] = set()  # folders that this module put on sys.path


def find(reference: str, folder: Path | None = None) -> Any:
    """Look an object up by ``package.module:Name``: beside ``folder``'s files first, then on Python's path.

    Raises :class:`FedalignError` if there is no such module, if importing it fails, or if it has no such name.

    >>> find("math:sqrt")(4.0)
    2.0
    >>> find("math:sqr")
    Traceback (most recent call last):
    fedalign.errors.FedalignError: module 'math' has no 'sqr'; did you mean 'sqrt'?
    """
    name, colon, attribute = reference.partition(":")
    if not colon or not all(part.isidentifier() for part in name.split(".")) or not attribute.isidentifier():
        raise FedalignError(f"{reference!r} is not of the form package.module:Name")
    module = _module(name, folder)
    if name.partition(".")[0] != "fedalign":
        _named.add(name)
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == name]
        names = own or [key for key in vars(module) if not key.startswith("_")]
        hint = nearest(attribute, names) if names else "it defines nothing"
        raise FedalignError(f"{_place(module)} has no {attribute!r}; {hint}") from error


def loaded() -> list[ModuleType]:
    """List the modules from beside settings files, with what they imported from there: other machines lack them."""
    homes, modules = {_home(path) for path in _loaded}, dict(sys.modules)

    def is_beside(name: str) -> bool:
        root = _file(modules.get(name.partition(".")[0]))  # of a package, whose modules are deeper
        return root is not None and _home(root) in homes

    # Some modules, such as torch.ops, have the relative name of no file.
    files = [(module, _file(module)) for name, module in modules.items() if is_beside(name)]
    return [module for module, path in files if path is not None and path.is_file()]


def _home(path: Path) -> Path:
    """Give the folder that a module's import starts from."""
    return path.parent.parent if path.name == "__init__.py" else path.parent


def _module(name: str, folder: Path | None) -> ModuleType:
    root = name.partition(".")[0]
    beside = _beside(root, folder) if folder is not None else None
    try:
        if beside is not None:
            _load(root, beside)
        elif _comes_from_elsewhere(root):
            raise ModuleNotFoundError(name=root)
        return importlib.import_module(name)
    except FedalignError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failure(name, beside, error) from error
        looked = f"beside the settings (in {folder}) or on" if folder is not None else "on"
        raise FedalignError(f"there is no module {error.name!r} {looked} Python's path") from error
    except (Exception, SystemExit) as error:
        raise _failure(name, beside, error) from error


def _beside(root: str, folder: Path) -> Path | None:
    """Find the file of a module or package in a folder."""
    for path in (folder / f"{root}.py", folder / root / "__init__.py"):
        if path.is_file():
            return path.resolve()
    return None


def _load(root: str, path: Path) -> None:
    """Make ``sys.modules`` hold the module of this very file, loading the file if that has not happened yet."""
    if root in sys.stdlib_module_names:
        raise FedalignError(f"{path} has the name of a module of Python's standard library; give the file another name")
    current = sys.modules.get(root)
    held = _file(current)
    if held == path:
        return
    if current is not None and (held is None or is_installed(held)):
        raise FedalignError(f"{path} has the name of the installed module {root!r}; give the file another name")
    loaded_names = [key for key in sys.modules if key == root or key.startswith(f"{root}.")]
    replaced = {key: sys.modules.pop(key) for key in loaded_names}
    if held in _loaded:
        _loaded[held] |= replaced
    importlib.invalidate_caches()
    if path in _loaded:
        sys.modules.update(_loaded[path])
        return
    home = _home(path)
    if home not in (Path(entry or os.curdir).resolve() for entry in sys.path):
        sys.path.append(str(home))
        _appended.add(home)
    places = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(root, path, submodule_search_locations=places)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[root] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[root]
        raise
    _loaded[path] = {root: module}


def _comes_from_elsewhere(root: str) -> bool:
    """Tell whether an import would find a module only because another settings file's folder is on ``sys.path``."""
    if root in sys.modules:
        return _file(sys.modules[root]) in _loaded
    spec = importlib.util.find_spec(root)
    if spec is None or spec.origin is None:
        return False
    return _home(Path(spec.origin).resolve()) in _appended


def _file(module: ModuleType | None) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name).resolve() if name else None


def is_installed(path: Path) -> bool:
    """Tell whether a file belongs to Python or to an installed package."""
    places = {Path(sysconfig.get_path(which)).resolve() for which in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(path.is_relative_to(place) for place in places)


def _place(module: ModuleType) -> str:
    path = _file(module)
    return path.name if path in _loaded else f"module {module.__name__!r}"


def _failure(name: str, beside: Path | None, error: BaseException) -> FedalignError:
    """Say in one sentence what went wrong in a user's module, and where."""
    return FedalignError(f"cannot import {name!r}: {in_words(error, beside)}")


def blame(error: BaseException) -> str | None:
    """Describe an exception that came through a module that settings name; None: it is not the user's code."""
    files = {path for path in (_file(sys.modules.get(name)) for name in _named) if path is not None}
    files |= {path for path in map(_file, loaded()) if path is not None}
    frames = [Path(frame.filename).resolve() for frame in traceback.extract_tb(error.__traceback__)]
    own = [path for path in frames if path in files]
    return in_words(error, own[-1]) if own else None


def in_words(error: BaseException, path: Path | None = None) -> str:
    """Describe an exception in one line: its type, its message, and the file and line that it came from.

    The line is the last one of the traceback in ``path``, if one is given and appears in it.
    """
    what = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {what[0]}" if what else type(error).__name__
    if isinstance(error, SyntaxError):
        return text  # it names the file and the line itself
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if path is None or Path(frame.filename).resolve() == path]
    frame = (inside or frames)[-1] if frames else None
    return f"{text} ({Path(frame.filename).name}, line {frame.lineno})" if frame is not None else text
