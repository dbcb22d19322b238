"""Pages of the repository become pages of the site, and the links between its files keep working.

Pages link to each other and to source files as on a code host. Source files become downloads, which Sphinx does by
itself. A folder has no page on the site, so a link to one becomes plain text. ``<!-- file: CHANGELOG.md -->`` in a page
stands for a file beside ``docs/``, with its links led to the site's pages.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

LINK = re.compile(r"\[([^\]\[]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
FILE = re.compile(r"<!-- file: (\S+) -->")
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def relinked(text: str, page: Path, site: Path, old: Path | None = None) -> str:
    """Lead a page's links to what the site has.

    ``page`` is the folder of the page on the site, ``site`` the folder of all pages, and ``old`` the folder that the
    links were written for, if that is another one. A link to nothing stays as it is: Sphinx warns of it.

    >>> relinked("[here](.) and [there](nothing.md#at-all)", Path("/tmp"), Path("/tmp"))
    'here and [there](nothing.md#at-all)'
    """

    def lead(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        path = ((old or page) / target).resolve()
        if not path.exists():
            return found[0]
        if not path.is_relative_to(site) and path.name in PAGES:
            path = site / PAGES[path.name]
        outside = path.suffix == ".md" and not path.is_relative_to(site)
        return words if path.is_dir() or outside else f"[{words}]({os.path.relpath(path, page)}{anchor})"

    return LINK.sub(lead, text)


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    path = Path(app.env.doc2path(docname))
    if path.suffix != ".md":
        return
    page, site = path.resolve().parent, Path(app.srcdir).resolve()
    source[0] = relinked(source[0], page, site)
    for name in FILE.findall(source[0]):
        file = site.parent / name
        app.env.note_dependency(str(file))
        text = relinked(file.read_text(encoding="utf-8"), page, site, old=site.parent)
        source[0] = source[0].replace(f"<!-- file: {name} -->", text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the links to Sphinx's reading of pages."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
