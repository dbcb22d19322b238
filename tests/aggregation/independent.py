"""The independent library byzfl, which our aggregators are compared with."""

import importlib
import importlib.util
import sys
import types

import numpy as np
import pytest


def load_byzfl(monkeypatch):
    """Import byzfl's aggregators. Its top level imports torchvision, so only the subpackage is loaded."""
    spec = importlib.util.find_spec("byzfl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("byzfl is not installed: pip install --no-deps byzfl")
    package = types.ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "byzfl", package)
    for name in [name for name in sys.modules if name.startswith("byzfl.")]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("byzfl.aggregators")


def as_arrays(vectors):
    """Give rows as the arrays of double precision that byzfl takes."""
    return np.stack([vector.double().numpy() for vector in vectors])
