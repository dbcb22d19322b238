"""The attacks of the independent library byzfl, which ours are compared with."""

import importlib
import importlib.util
import sys
import types

import pytest


def load_byzfl_attacks(monkeypatch):
    """Import byzfl's attacks and aggregators. Its top level imports torchvision, so only subpackages are loaded."""
    spec = importlib.util.find_spec("byzfl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("byzfl is not installed: pip install --no-deps byzfl")
    package = types.ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "byzfl", package)
    for name in [name for name in sys.modules if name.startswith("byzfl.")]:
        monkeypatch.delitem(sys.modules, name)
    attacks = importlib.import_module("byzfl.attacks.attacks")
    aggregators = importlib.import_module("byzfl.aggregators")
    return types.SimpleNamespace(**{**vars(aggregators), **vars(attacks)})
