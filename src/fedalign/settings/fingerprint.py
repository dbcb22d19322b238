"""Fingerprints of Python objects: the same whenever a script makes the same object, in any process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedalign.settings.user_modules import is_installed

_DEPTH = 20  # of objects in objects; what lies deeper is told apart by its type alone


def fingerprint(given: Any) -> str:
    """Hash what an object is: its type, its values, and the code of functions and classes that are the user's own.

    Names of variables outside, line numbers and comments do not count. Constants, functions and classes that code
    refers to do.

    >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 1)
    True
    >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 2)
    False
    """
    digest = hashlib.sha256()
    _feed(digest, given, (), _DEPTH)
    return digest.hexdigest()[:16]


def _feed(digest: Any, given: Any, inside: tuple[int, ...], depth: int) -> None:
    kind = type(given)
    digest.update(f"{kind.__module__}.{kind.__qualname__};".encode())
    if id(given) in inside or depth == 0:
        return
    inside = (*inside, id(given))
    if given is None or isinstance(given, bool | int | float | complex | str | bytes | Path | np.generic | torch.dtype):
        digest.update(repr(given).encode())
    elif isinstance(given, torch.Tensor):
        digest.update(f"{given.dtype}{tuple(given.shape)}".encode())
        digest.update(given.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(given, np.ndarray) and not given.dtype.hasobject:
        digest.update(f"{given.dtype.str}{given.shape}".encode())
        digest.update(np.ascontiguousarray(given).tobytes())
    else:
        for part in _parts(given):
            _feed(digest, part, inside, depth - 1)


def _parts(given: Any) -> list[Any]:
    """List what an object consists of."""
    if isinstance(given, Mapping):
        return [part for key in sorted(given, key=repr) for part in (key, given[key])]
    if isinstance(given, set | frozenset):
        return sorted(given, key=repr)
    if isinstance(given, list | tuple | np.ndarray):
        return list(given)
    if isinstance(given, functools.partial):
        return [given.func, given.args, given.keywords]
    if isinstance(given, types.MethodType):
        return [given.__self__, given.__func__]
    if isinstance(given, types.FunctionType):
        return _function(given)
    if isinstance(given, types.CodeType):
        return [given.co_code, *(c for c in given.co_consts if not _is_docstring(c, given)), given.co_names]
    if inspect.isclass(given):
        return _class(given)
    if isinstance(given, torch.nn.Module):
        return [type(given), repr(given), dict(given.state_dict())]
    return [type(given), *_values(given)]


def _function(given: types.FunctionType) -> list[Any]:
    if _is_library(given.__module__) and "<" not in given.__qualname__:
        return [given.__module__, given.__qualname__]
    cells = [_content(cell) for cell in given.__closure__ or ()]
    named = [given.__globals__[name] for name in _names(given.__code__) if name in given.__globals__]
    return [given.__code__, given.__defaults__, given.__kwdefaults__, cells, [n for n in named if _is_known(n)]]


def _names(code: types.CodeType) -> list[str]:
    inner = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names(constant)]
    return sorted({*code.co_names, *inner})


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_known(value: Any) -> bool:
    """Tell whether a value that code refers to is fixed: a constant, a function or a class, and not a module."""
    return isinstance(value, bool | int | float | str | tuple | types.FunctionType) or inspect.isclass(value)


def _class(given: type) -> list[Any]:
    name = [given.__module__, given.__qualname__]
    if _is_library(given.__module__):
        return name
    own = {k: getattr(v, "__func__", v) for k, v in vars(given).items()}
    code = {k: v for k, v in own.items() if _is_known(v) and k not in ("__module__", "__doc__", "__qualname__")}
    return [given.__qualname__, code, *given.__bases__]


def _values(given: Any) -> list[Any]:
    found = dict(getattr(given, "__dict__", {}))
    for cls in type(given).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if hasattr(given, name):
                found[name] = getattr(given, name)
    return [{key: value for key, value in found.items() if not isinstance(value, types.ModuleType)}]


def _is_docstring(constant: Any, code: types.CodeType) -> bool:
    return isinstance(constant, str) and bool(code.co_consts) and constant is code.co_consts[0]


def _is_library(name: str | None) -> bool:
    """Tell whether a module is an installed one, or this package: its version is not what a fingerprint is about."""
    module = sys.modules.get(name or "")
    path = getattr(module, "__file__", None)
    if (name or "").partition(".")[0] in ("fedalign", "builtins"):
        return True
    return module is not None and name != "__main__" and (path is None or is_installed(Path(path).resolve()))
