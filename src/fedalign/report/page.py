"""Writes a report: pictures as PNG and PDF files, and one HTML page that works without a network.

The page holds its data and its script. Words and tables are rendered from the templates in ``templates/`` with
autoescape on; the script in ``assets/page/`` draws the rest and puts texts in as text. Names, descriptions, reasons
and error messages come from users and clients, and must never be read as HTML. Charts are drawn by uPlot: it is the
lightest library that zooms and follows the pointer (51 kB; Plotly's smallest bundle has 1.2 MB). Its licence lies
beside it, and in the page.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from fedalign.errors import FedalignError
from fedalign.experiments.store import write_atomically
from fedalign.report import plot_style
from fedalign.report.gallery import gallery
from fedalign.report.page_data import packed, page_data
from fedalign.report.read_runs import RunFolder
from fedalign.report.sections import difference_rows, run_sections
from fedalign.report.words import across_words

#: the parts of the page that are rendered as HTML, by the id of the element that holds them
PARTS = {
    "summary-words": "summary.html.j2",
    "gains": "gains.html.j2",
    "ledger": "ledger.html.j2",
    "promises": "promises.html.j2",
    "cost-tables": "costs.html.j2",
    "setting-tables": "settings.html.j2",
}
_SCRIPTS = ("base", "chart", "curves", "map", "client", "choices", "main")  # in the order in which they are defined


@dataclass(frozen=True)
class Report:
    """The files that a report consists of: its HTML page, and every picture as PNG and PDF."""

    page: Path
    pictures: list[Path]


def write_report(runs: Sequence[RunFolder], folder: Path) -> Report:
    """Draw the pictures of all runs into ``folder`` and write ``report.html`` there.

    Several runs share one page; their pictures' file names then begin with the run's number and folder. Raises
    :class:`FedalignError` if the folder cannot be written.
    """
    pictures: list[Path] = []
    names: list[list[str]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, run in enumerate(runs, start=1):
            prefix = "" if len(runs) == 1 else f"{number}-{run.folder.name}-"
            names.append([])
            for picture in gallery(run):
                pictures += plot_style.save(picture.figure, folder / f"{prefix}{picture.name}")
                names[-1].append(f"{prefix}{picture.name}")
        page = folder / "report.html"
        write_atomically(page, render_page(runs, names))
    except OSError as error:
        raise FedalignError(f"cannot write the report to {folder}: {error.strerror}") from error
    return Report(page, pictures)


def render_page(
    runs: Sequence[RunFolder],
    pictures: Sequence[Sequence[str]] = (),
    *,
    live: bool = False,
    status: str = "",
    above: str = "",
) -> str:
    """Render the page of some runs; a ``live`` page asks its server for newer data, and shows ``status``.

    ``above`` is HTML that stands above the report, with its own names escaped.
    """
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            title=", ".join(dict.fromkeys(run.name for run in runs)),
            html=render_parts(runs, pictures),
            data=packed(page_data(runs)),
            assets=_assets(),
            live=live,
            status=status,
            above=Markup(above),
        )
    )


def render_parts(runs: Sequence[RunFolder], pictures: Sequence[Sequence[str]] = ()) -> dict[str, Markup]:
    """Render the words and tables of some runs: HTML by the id of the element that holds it."""
    sections, made = run_sections(runs, pictures), environment()
    shared = {
        "runs": sections,
        "across": across_words(runs, [section["label"] for section in sections]),
        "differences": difference_rows(runs),
    }
    return {name: Markup(made.get_template(template).render(shared)) for name, template in PARTS.items()}


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment that renders the package's templates, with autoescape on."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("fedalign.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


@functools.cache
def _assets() -> dict[str, Markup]:
    """Read the scripts and styles that the page holds."""
    folder = resources.files("fedalign.report") / "assets"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    return {
        "chart_css": Markup(read("uplot.min.css")),
        "chart_js": Markup(f"/*\n{read('uplot.LICENSE')}*/\n{read('uplot.min.js')}"),
        "theme": Markup(read("page/theme.js")),
        "page_js": Markup("\n".join(read(f"page/{name}.js") for name in _SCRIPTS)),
    }
