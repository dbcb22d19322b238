"""Writes a report: pictures as PNG and PDF, and one HTML page that carries them."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalign.errors import FedalignError
from fedalign.protocol.plan import warmup_rounds
from fedalign.report import choices, plots
from fedalign.report import theory_plots as theory
from fedalign.report.read_runs import RunFolder
from fedalign.report.table import HEADINGS, INCENTIVE, NOTE, incentive_rows, rows

_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .35rem .8rem; text-align: right; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #444; }
tbody tr { border-bottom: 1px solid #ddd; } tr.best { font-weight: 700; color: #00684d; }
img { max-width: 100%; } .note { color: #555; font-size: .9rem; } .bad { color: #a33; }
"""


@dataclass(frozen=True)
class Report:
    """Where a report's files are."""

    page: Path
    pictures: list[Path]


def write_report(runs: Sequence[RunFolder], folder: Path) -> Report:
    """Draw every run's pictures into ``folder`` and write ``report.html`` there."""
    sections, pictures = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, run in enumerate(runs, start=1):
            prefix = "" if len(runs) == 1 else f"{number}-{run.folder.name}-"
            made = _draw(run, folder, prefix)
            pictures += made
            sections.append(_section(run, [path for path in made if path.suffix == ".png"]))
        page = folder / "report.html"
        title = html.escape(", ".join(run.name for run in runs))
        page.write_text(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_CSS}</style>'
            f"<body>{''.join(sections)}</body></html>\n",
            encoding="utf-8",
        )
    except OSError as error:
        raise FedalignError(f"cannot write the report to {folder}: {error.strerror}") from error
    return Report(page, pictures)


def _draw(run: RunFolder, folder: Path, prefix: str) -> list[Path]:
    warmup = warmup_rounds(run.settings["warmup"], run.settings["rounds"])
    written: list[Path] = []
    drawings = [
        ("accuracy", "test_accuracy", "Test accuracy of the priority clients", "test accuracy (%)", True),
        ("loss", "train_loss", "Training loss of the priority clients", "training loss", False),
    ]
    for file, name, title, label, percent in drawings:
        arms = {
            a: r
            for a, r in run.histories.items()
            if any(getattr(x, name) is not None for h in r.values() for x in h.rounds)
        }
        if arms:
            figure = plots.curves(arms, name, f"{run.name}: {title.lower()}", label, warmup, percent=percent)
            written += plots.save(figure, folder / f"{prefix}{file}")
    if any(r.test_accuracy is not None for own in run.histories.values() for h in own.values() for r in h.rounds):
        figure = plots.costs(run.histories, f"{run.name}: test accuracy against cost")
        written += plots.save(figure, folder / f"{prefix}cost")
    for arm, histories in run.histories.items():
        if (drawn := choices.chosen(histories, f"{run.name}: ε that the priority clients chose ({arm})")) is not None:
            written += plots.save(drawn, folder / f"{prefix}epsilon-{arm}")
        if (
            drawn := choices.losses(histories, f"{run.name}: what the priority clients chose among ({arm})")
        ) is not None:
            written += plots.save(drawn, folder / f"{prefix}candidates-{arm}")
        if plots.selects(histories):
            figure = plots.admitted(histories, f"{run.name}: free clients admitted by {arm}")
            written += plots.save(figure, folder / f"{prefix}admitted-{arm}")
    if any(r.theta < 1 for own in run.histories.values() for h in own.values() for r in h.rounds):
        shared = {a: h for a, h in run.histories.items() if not run.summary["arms"][a]["alone"]}
        title = f"{run.name}: θ, the priority clients' part of the aggregate, mean so far"
        written += plots.save(plots.curves(shared, "theta", title, "θ", warmup), folder / f"{prefix}theta")
    biased = {
        a: own for a, own in run.histories.items() if all(h.rounds and h[-1].rho is not None for h in own.values())
    }
    if any(h[-1].rho for own in biased.values() for h in own.values()):
        title = f"{run.name}: ρ, the bound's bias, so far"
        written += plots.save(plots.curves(biased, "rho", title, "ρ", warmup), folder / f"{prefix}rho")
    if (drawn := theory.picture(run.summary.get("theory", {}), f"{run.name}: error and bound")) is not None:
        written += plots.save(drawn, folder / f"{prefix}theory")
    alone = next((arm for arm, figures in run.summary["arms"].items() if figures["alone"]), None)
    if alone is not None and run.summary.get("incentive"):
        drawn = plots.incentive(run.clients, alone, f"{run.name}: free clients, shared model against their own")
        if drawn is not None:
            written += plots.save(drawn, folder / f"{prefix}incentive")
    return written


def _section(run: RunFolder, pictures: Sequence[Path]) -> str:
    summary = run.summary
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    body = "".join(
        f"<tr{' class=best' if best else ''}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for *cells, best in rows(summary)
    )
    gains = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>" for cells in incentive_rows(summary)
    )
    if gains:
        titles = "".join(f"<th>{heading}</th>" for heading in INCENTIVE)
        gains = (
            f"<h2>Is a free client better off than alone?</h2><table><thead><tr>{titles}</tr></thead>"
            f'<tbody>{gains}</tbody></table><p class="note">Free clients\' accuracy on their own test data after the '
            "last round, mean over clients and seeds.</p>"
        )
    images = "".join(
        f'<p><img alt="{path.stem}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"></p>'
        for path in pictures
    )
    failed = "".join(
        f'<p class="bad">{html.escape(f"{arm}, seed {seed}: {message}")}</p>'
        for arm, figures in summary["arms"].items()
        for seed, message in figures["diverged"].items()
    )
    return (
        f"<h1>{html.escape(run.name)}</h1><p>{html.escape(run.settings['description'])}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{failed}"
        f'<p class="note">{summary["rounds"]} rounds, seeds {", ".join(map(str, summary["seeds"]))}, on '
        f"{html.escape(summary['device'])}, {summary['seconds']:.1f} s. Final figures are means of the last 10 rounds; "
        f"± is the standard deviation over seeds. {NOTE} Settings: config.toml beside this page's run.</p>"
        f"{gains}{_theory(summary.get('theory'))}{images}"
    )


def _theory(summary: Mapping[str, Any] | None) -> str:
    if not summary:
        return ""
    if "fails" in summary:
        return f'<h2>Theory</h2><p class="bad">No bound: {html.escape(summary["fails"])}.</p>'
    head = "".join(f"<th>{heading}</th>" for heading in theory.HEADINGS)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>" for cells in theory.rows(summary)
    )
    return (
        f"<h2>Theory</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f'<p class="note">{html.escape(theory.note(summary))}</p>'
    )
