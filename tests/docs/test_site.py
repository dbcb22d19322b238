"""The documentation site is built without a warning, needs no network, and has every public name and command."""

from __future__ import annotations

import doctest
import html
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedalign
from fedalign.cli import command_line

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REMOTE = re.compile(
    r"""(?:src|srcset|poster)\s*=\s*["']?\s*(?:https?:)?//|@import\s+["']?(?:https?:)?//|url\(["']?(?:https?:)?//"""
)
LINKED = re.compile(r"<link\b[^>]*>")


@pytest.fixture
def extension(monkeypatch):
    """Give a function that imports one of the site's extensions."""
    monkeypatch.syspath_prepend(DOCS / "_extensions")
    return importlib.import_module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site; a warning fails it."""
    folder = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-n", "-q", "-b", "html", "-d", folder / "doctrees"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, DOCS, folder / "html"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def remote(text):
    """List what a page would load from elsewhere; links that a reader may follow are not loaded."""
    links = [tag for tag in LINKED.findall(text) if re.search(r"""href\s*=\s*["']?(?:https?:)?//""", tag)]
    return [found[0] for found in REMOTE.finditer(text)] + links


def test_what_is_loaded_from_elsewhere_is_noticed():
    assert remote('<script src="https://cdn.example/x.js"></script>')
    assert remote("<img alt='' src=//cdn.example/x.png>")
    assert remote("<style>@import 'https://fonts.example/a.css';</style>")
    assert remote('<link rel="stylesheet" href="https://fonts.example/a.css"/>')
    assert not remote('<a href="https://example.com">there</a> <img src="_images/a.png"> <link href="a.css"/>')


@pytest.mark.slow
def test_no_page_needs_the_internet(site):
    pages = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".svg")]
    assert len(pages) > 60
    assert {str(path.relative_to(site)): remote(path.read_text(encoding="utf-8")) for path in pages} == {
        str(path.relative_to(site)): [] for path in pages
    }


@pytest.mark.slow
def test_every_public_name_has_an_entry(site):
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    missing = [name for name in fedalign.__all__ if f'id="fedalign.{name}"' not in text]
    assert not missing


@pytest.mark.slow
def test_every_command_is_on_its_page(site, extension):
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "command-line.html").read_text(encoding="utf-8")))
    for command, about in extension("command_line_page").commands(command_line.make_parser()):
        assert command.prog in page
        assert about, f"{command.prog} has no line in the help"
        for option in (name for action in command._actions if action.dest != "help" for name in action.option_strings):
            assert option in page, f"{command.prog} {option}"
    assert "\0" not in page


@pytest.mark.slow
def test_pages_name_no_folder_of_this_machine(site):
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert str(ROOT) not in text, path.name
        assert str(Path.home()) + "/" not in text.replace(str(Path.home() / ".cache"), ""), path.name


@pytest.mark.slow
def test_pages_reach_all_documents(site):
    index = (site / "index.html").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        if "_build" not in page.parts and page.parent.name != "api":
            name = page.relative_to(DOCS).with_suffix(".html").as_posix()
            assert (site / name).is_file(), name
            assert name == "index.html" or f'href="{name}' in index, f"no link leads from the first page to {name}"
    for notebook in DOCS.rglob("*.ipynb"):
        assert "cell_output" in (site / "notebooks" / f"{notebook.stem}.html").read_text(encoding="utf-8")


def test_the_api_pages_have_every_name_once(extension, tmp_path):
    pages = extension("api_pages")
    assert pages.uncovered(DOCS / "api") == []
    (tmp_path / "some.md").write_text("<!-- names: fedalign.rules.align -->\n<!-- names: fedalign.rules -->\n")
    wrong = pages.uncovered(tmp_path)
    assert "Align is on 2 pages of the API reference" in wrong
    assert "Federation is on no page of the API reference" in wrong


def test_names_in_settings_are_all_there(extension):
    from fedalign import registry

    text = extension("api_pages").registries_text()
    for name in registry.__all__:
        table = getattr(registry, name)
        if isinstance(table, registry.Registry):
            assert all(f"| `{built_in}` |" in text for built_in in table.entries), name
    assert "`trim=" in text


@pytest.mark.parametrize("name", ["api_pages", "command_line_page", "repository_links"])
def test_the_extensions_examples_run(extension, name):
    assert doctest.testmod(extension(name)).failed == 0


def test_links_of_files_beside_the_pages_lead_to_pages(extension):
    relinked = extension("repository_links").relinked
    text = "[a](docs/report.md#the-page) [b](CONTRIBUTING.md) [c](src/fedalign/errors.py) [d](src) [e](README.md#map)"
    assert relinked(text, DOCS, DOCS, old=ROOT) == (
        "[a](report.md#the-page) [b](contributing.md) [c](../src/fedalign/errors.py) d e"
    )
