"""What the page says about a run in words and tables: the values that the templates need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedalign.report import ledger_table, metrics_table, personal_table, promise_table, theory_table
from fedalign.report.differences import differing, labels, setting_rows
from fedalign.report.read_runs import RunFolder
from fedalign.report.table import INCENTIVE, INCENTIVE_NOTE, INCENTIVE_TITLE, NOTE, headings, incentive_rows, rows
from fedalign.report.words import summary_words

_COSTS = {"models_down": "models to clients", "models_up": "models from clients", "samples": "samples trained on"}


def run_sections(runs: Sequence[RunFolder], pictures: Sequence[Sequence[str]] = ()) -> list[dict[str, Any]]:
    """Collect the words and tables of every run; ``pictures`` are the names of the pictures of each run."""
    names = labels([run.settings for run in runs], [str(run.folder) for run in runs])
    drawn = pictures or [()] * len(runs)
    return [
        {**_section(run, name, own), "ledger": ledger_table.ledger_tables(run, number)}
        for number, (run, name, own) in enumerate(zip(runs, names, drawn, strict=True))
    ]


def difference_rows(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return the settings that differ between runs as rows of a table."""
    found = differing([run.settings for run in runs])
    return [{"cells": [key, *texts], "best": False} for key, texts in found.items()]


def rounds_done(run: RunFolder) -> int:
    """Return how many rounds all runs of a folder have, except those that diverged or stopped early."""
    arms = run.summary["arms"]
    return min(
        (
            len(history)
            for arm, runs in run.histories.items()
            for seed, history in runs.items()
            if str(seed) not in {**arms[arm]["diverged"], **arms[arm].get("stopped", {})}
        ),
        default=int(run.settings["rounds"]),
    )


def _section(run: RunFolder, label: str, pictures: Sequence[str]) -> dict[str, Any]:
    summary, total, done = run.summary, run.settings["rounds"], rounds_done(run)
    return {
        "label": label,
        "folder": str(run.folder),
        "description": run.settings["description"],
        "adversary": _adversary(run.settings),
        "words": summary_words(run),
        "headings": headings(summary),
        "rows": [{"cells": cells, "best": best} for *cells, best in rows(summary)],
        "note": NOTE,
        "done": total if done >= total else f"{done} of {total}",
        "seeds": summary["seeds"],
        "device": summary.get("device"),
        "seconds": summary.get("seconds"),
        "metrics": _metrics(summary),
        "incentive": _incentive(summary),
        "promise": _promise(summary),
        "theory": _theory(summary),
        "cost_headings": list(_COSTS.values()),
        "costs": _costs(summary),
        "settings": [{"cells": row, "best": False} for row in setting_rows(run.settings).items()],
        "pictures": pictures,
    }


def _adversary(settings: dict[str, Any]) -> str | None:
    """Describe the run's hostile clients; None without any."""
    from fedalign.attacks.settings import in_words

    return in_words(settings["adversary"]) if "adversary" in settings else None


def _costs(summary: dict[str, Any]) -> list[dict[str, Any]]:
    arms = summary["arms"]
    most = {key: max((figures[key] or 0 for figures in arms.values()), default=0) or 1 for key in _COSTS}
    return [
        {
            "arm": arm,
            "cells": [
                {
                    "text": "–" if figures[key] is None else f"{figures[key]:,.0f}",
                    "part": round(100 * (figures[key] or 0) / most[key], 1),
                }
                for key in _COSTS
            ],
        }
        for arm, figures in arms.items()
    ]


def _metrics(summary: dict[str, Any]) -> dict[str, Any] | None:
    found = metrics_table.metric_rows(summary)
    if not found:
        return None
    rows = [{"cells": cells, "best": False} for cells in found[1:]]
    return {"headings": found[0], "rows": rows, "note": metrics_table.NOTE}


def _incentive(summary: dict[str, Any]) -> dict[str, Any] | None:
    if personal := personal_table.personal_rows(summary):
        return {
            "title": personal_table.TITLE,
            "headings": personal_table.HEADINGS,
            "rows": [{"cells": cells, "best": False} for cells in personal],
            "note": personal_table.NOTE,
        }
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
