"""API pages list the public names themselves: a marker in a page becomes the entries of all names from some modules.

``<!-- names: fedalign.rules -->`` stands for every name in ``fedalign.__all__`` that is defined in ``fedalign.rules``
or below; ``<!-- objects: fedalign.protocol.plan.Plan … -->`` for objects that users import from their modules;
``<!-- module: fedalign.testing -->`` for a module with its public members; ``<!-- registries -->`` for the names that
settings may give. A public name on no page, or on two, is a warning, which fails the build.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import fedalign
from fedalign import registry
from fedalign.settings.lookup import Registry

NAMES = re.compile(r"<!-- names: ([\w. ]+) -->")
MODULE = re.compile(r"<!-- module: ([\w.]+) -->")
OBJECTS = re.compile(r"<!-- objects: ([\w. ]+) -->")
REGISTRIES = "<!-- registries -->"


def public_names(modules: list[str]) -> list[str]:
    """List the names of ``fedalign.__all__`` that are defined in one of the modules or below."""

    def inside(name: str) -> bool:
        home = getattr(getattr(fedalign, name), "__module__", "")
        return any(home == module or home.startswith(f"{module}.") for module in modules)

    return [name for name in fedalign.__all__ if inside(name)]


def names_text(modules: list[str]) -> str:
    """Write a table of the modules' public names, then an entry for each of them."""
    names = public_names(modules)
    if not names:
        return f"```{{error}}\nNo public name is defined in {', '.join(modules)}.\n```\n"
    rows = [".. autosummary::", "   :nosignatures:", "", *(f"   ~fedalign.{name}" for name in names)]
    return "\n\n".join([_rst(*rows), *(_entry("fedalign", name) for name in names)])


def _entry(module: str, name: str) -> str:
    entry = getattr(importlib.import_module(module), name)
    if not isinstance(entry, type):
        return f"## {name}\n\n" + _rst(f".. autofunction:: {module}.{name}")
    told = [base for base in entry.__bases__ if base is not object and base.__name__ != name]
    options = ["   :members:", *(["   :show-inheritance:"] if told else [])]
    return f"## {name}\n\n" + _rst(f".. autoclass:: {module}.{name}", *options)


def _rst(*lines: str) -> str:
    return "\n".join(["```{eval-rst}", *lines, "```"])


def objects_text(references: list[str]) -> str:
    """Write an entry for each object, given as ``package.module.Name``."""
    return "\n\n".join(_entry(*reference.rsplit(".", 1)) for reference in references)


def module_text(module: str) -> str:
    """Write the entry of a module with all its public members."""
    return _rst(f".. automodule:: {module}", "   :members:", "   :show-inheritance:")


def registries_text() -> str:
    """Write a table of built-in names, with their options, for everything that settings name."""
    parts = []
    for attribute in registry.__all__:
        table = getattr(registry, attribute)
        if isinstance(table, Registry):
            rows = [f"| `{name}` | {text} | {_options(table, name)} |" for name, text in table.descriptions().items()]
            parts += [
                f"## {table.noun.capitalize()}",
                "",
                "| name | what it is | options and defaults |",
                "|---|---|---|",
            ]
            parts += [*(row.replace("|F_k − F|", r"\|F_k − F\|") for row in rows), ""]
    return "\n".join(parts)


def _options(table: Registry, name: str) -> str:
    """Write the options of a built-in as its signature has them."""
    if table is registry.ALGORITHMS:
        return ""  # a driver calls them, with the plan of a run
    taken = list(inspect.signature(table.find(name)).parameters.values())[table.given :]
    shown = [str(option.replace(annotation=inspect.Parameter.empty)) for option in taken]
    return ", ".join(f"`{text}`" for text in shown)


def expand(text: str) -> str:
    """Replace all markers of a page.

    >>> "## Align" in expand("<!-- names: fedalign.rules.align -->")
    True
    """
    text = NAMES.sub(lambda found: names_text(found[1].split()), text)
    text = OBJECTS.sub(lambda found: objects_text(found[1].split()), text)
    text = MODULE.sub(lambda found: module_text(found[1]), text)
    return text.replace(REGISTRIES, registries_text()) if REGISTRIES in text else text


def uncovered(folder: Path) -> list[str]:
    """List what is wrong with the pages of a folder: names that are on none of them, and names on several."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(folder.glob("*.md")))
    found = Counter(name for names in NAMES.findall(text) for name in public_names(names.split()))
    missing = [f"{name} is on no page of the API reference" for name in fedalign.__all__ if not found[name]]
    return missing + [f"{name} is on {times} pages of the API reference" for name, times in found.items() if times > 1]


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname.startswith("api/"):
        source[0] = expand(source[0])


def _always_read(app: Sphinx, env: BuildEnvironment, *documents: set[str]) -> list[str]:
    """Have the API pages read in every build: their text comes from the package."""
    return sorted(name for name in env.found_docs if name.startswith("api/"))


def _check(app: Sphinx) -> None:
    for sentence in uncovered(Path(app.srcdir) / "api"):
        logging.getLogger(__name__).warning(sentence)


def _resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> Any:
    """Lead ``fedalign.rules.align.Align`` in a signature to the entry of ``fedalign.Align``."""
    name = str(node.get("reftarget", "")).rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in fedalign.__all__:
        return None
    python = env.get_domain("py")
    return python.resolve_xref(env, node["refdoc"], app.builder, "obj", f"fedalign.{name}", node, content)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the markers to Sphinx's reading of pages."""
    app.connect("source-read", _read)
    app.connect("env-get-outdated", _always_read)
    app.connect("builder-inited", _check)
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
