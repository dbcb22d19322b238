"""The data that the page's script draws: one object for all runs, compressed into a text that HTML can hold."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Sequence
from typing import Any

from fedalign.protocol.plan import warmup_rounds
from fedalign.protocol.records import History, Promise, RoundRecord
from fedalign.report.client_data import Texts, client_columns, client_names, client_tests, detail_step, rounded
from fedalign.report.differences import labels
from fedalign.report.measures import Measure, has_values, headline, measures_of
from fedalign.report.plot_style import style_numbers
from fedalign.report.read_runs import RunFolder


def page_data(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Collect what the page shows of these runs: numbers are rounded, what no round has is left out."""
    possible = dict.fromkeys(m for run in runs for m in measures_of(run.histories))
    measures = [m for m in possible if any(has_values(run.histories, m) for run in runs)]
    reasons = Texts()
    step = detail_step(history for run in runs for own in run.histories.values() for history in own.values())
    names = labels([run.settings for run in runs], [str(run.folder) for run in runs])
    styles = style_numbers([arm for run in runs for arm in run.histories])
    return {
        "measures": [{"key": m.key, "label": m.label, "percent": m.percent} for m in measures],
        "headline": headline(runs[0].histories).key,
        "step": step,
        "runs": [
            _run(run, name, measures, styles, step, reasons) for run, name in zip(runs, names, strict=True)
        ],
        "reasons": list(reasons.found),
    }  # fmt: skip


def packed(data: dict[str, Any]) -> str:
    """Compress data into base64 text: it has no character that HTML gives a meaning to."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode("ascii")


def _run(
    run: RunFolder, label: str, measures: Sequence[Measure], styles: dict[str, int], step: int, reasons: Texts
) -> dict[str, Any]:
    alone = [arm for arm, figures in run.summary["arms"].items() if figures["alone"]]
    return {
        "label": label,
        "name": run.name,
        "rounds": run.settings["rounds"],
        "warmup": warmup_rounds(run.settings["warmup"], run.settings["rounds"]),
        "clients": client_names(run),
        "hostile": run.summary.get("hostile", {}),
        "tests": client_tests(run),
        "own": alone[0] if alone else None,
        "arms": [
            {
                "name": arm,
                "style": styles[arm],
                "alone": arm in alone,
                "seeds": [_seed(seed, history, measures, step, reasons) for seed, history in runs.items()],
            }
            for arm, runs in run.histories.items()
        ],
    }


def _seed(seed: int, history: History, measures: Sequence[Measure], step: int, reasons: Texts) -> dict[str, Any]:
    rounds = history.rounds
    found: dict[str, Any] = {
        "seed": seed,
        "rounds": len(rounds),
        "values": {m.key: [rounded(_finite(m.of(r)), 5) for r in rounds] for m in measures},
        "sent": [r.models_up + r.models_down for r in rounds],
        "samples": [r.samples for r in rounds],
        "reference": [rounded(_finite(r.global_loss)) for r in rounds],
        "epsilon": [_epsilon(r.epsilon) for r in rounds],
        "clients": client_columns(history, step, reasons),
    }
    if any(r.tried for r in rounds):
        found["choices"] = [_choice(r) for r in rounds]
    if any(r.promise is not None for r in rounds):
        found["promise"] = [_promise(r.promise) for r in rounds]
    if any(r.skipped for r in rounds):
        found["skipped"] = {str(r.round): r.skipped for r in rounds if r.skipped}
    return found


def _choice(record: RoundRecord) -> dict[str, Any] | None:
    """Return the candidates of a round as [ε, free clients, loss], which one was chosen, and whether it was served."""
    if not record.tried:
        return None
    fallback = record.fallback
    return {
        "tried": [[_epsilon(t.epsilon), t.admitted, rounded(_finite(t.loss))] for t in record.tried],
        "chosen": next((i for i, t in enumerate(record.tried) if t.chosen), None),
        "fallback": bool(fallback and fallback.behind),
        "alone": rounded(_finite(fallback.loss)) if fallback else None,
    }


def _promise(promise: Promise | None) -> list[float | None] | None:
    """Return by how much the served model is worse: measured, at most, and strictly at most."""
    if promise is None or promise.worse_by is None:
        return None
    measured = (promise.lost - promise.gained) / max(promise.samples, 1)
    return [rounded(measured), rounded(promise.worse_by), rounded(promise.strict)]


def _epsilon(value: float | None) -> float | str | None:
    return "inf" if value == math.inf else rounded(value)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
