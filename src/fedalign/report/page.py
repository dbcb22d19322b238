"""Writes a report: pictures as PNG and PDF files, and one HTML page that contains its pictures.

The page is rendered from the templates in ``templates/`` with autoescape on: names, descriptions and error messages
come from users and clients, and must never be read as HTML.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from fedalign.errors import FedalignError
from fedalign.report import plot_style, promise_table, theory_table
from fedalign.report.gallery import gallery
from fedalign.report.read_runs import RunFolder
from fedalign.report.table import INCENTIVE, INCENTIVE_NOTE, INCENTIVE_TITLE, headings, incentive_rows, note, rows


@dataclass(frozen=True)
class Report:
    """The files that a report consists of: its HTML page, and every picture as PNG and PDF."""

    page: Path
    pictures: list[Path]


def write_report(runs: Sequence[RunFolder], folder: Path) -> Report:
    """Draw the pictures of all runs into ``folder`` and write ``report.html`` there.

    Several runs share one page; their pictures' file names then begin with the run's number and folder.
    """
    sections: list[dict[str, Any]] = []
    pictures: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, run in enumerate(runs, start=1):
            prefix = "" if len(runs) == 1 else f"{number}-{run.folder.name}-"
            images = []
            for picture in gallery(run):
                written = plot_style.save(picture.figure, folder / f"{prefix}{picture.name}")
                pictures += written
                images.append({"title": picture.title, "data": _base64_png(written)})
            sections.append(_section(run, images))
        page = folder / "report.html"
        page.write_text(render_page(sections), encoding="utf-8")
    except OSError as error:
        raise FedalignError(f"cannot write the report to {folder}: {error.strerror}") from error
    return Report(page, pictures)


def render_page(sections: Sequence[dict[str, Any]]) -> str:
    """Render the HTML page; a section is what ``templates/run.html.j2`` needs for one run."""
    return environment().get_template("report.html.j2").render(sections=sections)


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


def _section(run: RunFolder, images: Sequence[dict[str, str]]) -> dict[str, Any]:
    summary = run.summary
    return {
        "name": run.name,
        "description": run.settings["description"],
        "adversary": _adversary(run.settings),
        "summary": summary,
        "headings": headings(summary),
        "rows": [{"cells": cells, "best": best} for *cells, best in rows(summary)],
        "note": note(summary),
        "failures": [
            f"{arm}, seed {seed}: {message}"
            for arm, figures in summary["arms"].items()
            for seed, message in figures["diverged"].items()
        ],
        "incentive": _incentive(summary),
        "promise": _promise(summary),
        "theory": _theory(summary),
        "images": images,
    }


def _adversary(settings: dict[str, Any]) -> str | None:
    """Describe the run's hostile clients; None without any."""
    from fedalign.attacks.settings import in_words

    return in_words(settings["adversary"]) if "adversary" in settings else None


def _incentive(summary: dict[str, Any]) -> dict[str, Any] | None:
    found = incentive_rows(summary)
    if not found:
        return None
    return {
        "title": INCENTIVE_TITLE,
        "headings": INCENTIVE,
        "rows": [{"cells": cells, "best": False} for cells in found],
        "note": INCENTIVE_NOTE,
    }


def _promise(summary: dict[str, Any]) -> dict[str, Any] | None:
    found = promise_table.promise_rows(summary)
    if not found:
        return None
    return {
        "title": promise_table.TITLE,
        "sentences": promise_table.promise_sentences(summary),
        "headings": promise_table.HEADINGS,
        "rows": [{"cells": cells, "best": False} for cells in found],
        "note": promise_table.NOTE,
    }


def _theory(summary: dict[str, Any]) -> dict[str, Any] | None:
    theory = summary.get("theory")
    if not theory:
        return None
    if "fails" in theory:
        return {"fails": theory["fails"]}
    return {
        "fails": None,
        "headings": theory_table.HEADINGS,
        "rows": [{"cells": cells, "best": False} for cells in theory_table.theory_rows(theory)],
        "note": theory_table.theory_note(theory),
    }


def _base64_png(files: Sequence[Path]) -> str:
    png = next(path for path in files if path.suffix == ".png")
    return base64.b64encode(png.read_bytes()).decode("ascii")
