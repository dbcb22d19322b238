"""The page of a red team, ``redteam.html``: the heat map, the worst cases, every attack, and the backdoors."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedalign.attacks.catalogue import NO_ATTACK
from fedalign.attacks.settings import in_words
from fedalign.errors import FedalignError
from fedalign.experiments.redteam import BASELINE, RedTeam
from fedalign.experiments.redteam_table import Row, Worst, as_csv, as_json, worst_cases
from fedalign.experiments.store import write_atomically
from fedalign.report import plot_style
from fedalign.report.page import environment
from fedalign.report.redteam_plot import heat_map, signed, tint

NOTE = (
    "Points of test accuracy above priority: the mean over seeds. Aggregators that take the number of attackers, "
    "written rule+aggregator, are told the true one; the rules are not."
)


def write_redteam(team: RedTeam, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write ``redteam.json``, ``.csv``, ``.html`` and the heat map; returns their paths, the page first."""
    experiment, worst = team.experiment, worst_cases(rows)
    try:
        write_atomically(folder / "redteam.json", json.dumps(as_json(team, rows), indent=2, allow_nan=False) + "\n")
        write_atomically(folder / "redteam.csv", as_csv(rows))
        pictures = plot_style.save(heat_map(worst, f"{experiment.name}: worst case over attacks"), folder / "redteam")
        page = environment().get_template("redteam.html.j2").render(
            name=experiment.name,
            description=experiment.settings["description"],
            rounds=experiment.rounds,
            seeds=experiment.seeds,
            picture=base64.b64encode(pictures[0].read_bytes()).decode("ascii"),
            worst=[_worst_row(one) for one in worst],
            rules=_rules(rows),
            tables=[_page_table(rows, fraction) for fraction in team.fractions],
            backdoors=_backdoors(rows),
            diverged=[row for row in rows if row.diverged],
            attacks={name: _what_it_does(table) for name, table in team.attacks.items()},
            note=NOTE,
        )  # fmt: skip
        write_atomically(folder / "redteam.html", page)
    except OSError as error:
        raise FedalignError(f"cannot write the report to {folder}: {error.strerror}") from error
    return [folder / "redteam.html", *pictures, folder / "redteam.csv", folder / "redteam.json"]


def terminal_tables(team: RedTeam, rows: Sequence[Row]) -> list[Table]:
    """Draw the results for a terminal: the worst cases, a table of all attacks for each fraction, and backdoors."""
    rules, worst = _rules(rows), worst_cases(rows)
    shown = [0.0, *team.fractions]
    summary = Table(title=f"{team.experiment.name}: worst case over attacks (worst seed)", caption=NOTE)
    summary.add_column("rule", overflow="fold")
    for fraction in shown:
        summary.add_column(_percent(fraction), justify="right", no_wrap=True)
    for rule in rules:
        cells = {one.fraction: f"{signed(one.gain)} ({signed(one.worst_seed)})" for one in worst if one.rule == rule}
        summary.add_row(rule, *[cells[fraction] for fraction in shown])
    tables = [summary]
    for fraction in team.fractions:
        table = Table(title=f"{_percent(fraction)} hostile: points above {BASELINE}, mean over seeds")
        table.add_column("attack", no_wrap=True)
        for rule in rules:
            table.add_column(rule, justify="right", overflow="fold")
        for attack, gains in _by_attack(rows, fraction).items():
            table.add_row(attack, *[_coloured(gains[rule].gain) for rule in rules])
        tables.append(table)
    if backdoors := _backdoors(rows):
        table = Table(title="success of backdoors, %")
        for heading in backdoors["headings"]:
            named = heading == "attack"
            table.add_column(heading, justify="left" if named else "right", overflow="fold", no_wrap=named)
        for row in backdoors["rows"]:
            table.add_row(*row["cells"])
        tables.append(table)
    return tables


def _worst_row(one: Worst) -> dict[str, Any]:
    return {
        **vars(one),
        "percent": f"{100 * one.fraction:g}",
        "mean": _cell(one.gain),
        "seed": _cell(one.worst_seed),
    }


def _what_it_does(table: Mapping[str, Any]) -> str:
    """Describe an attack without saying how many clients are hostile."""
    return in_words({**table, "fraction": 1.0}).partition(": ")[2]


def _page_table(rows: Sequence[Row], fraction: float) -> dict[str, Any]:
    found = _by_attack(rows, fraction)
    return {
        "percent": f"{100 * fraction:g}",
        "rows": [
            {"attack": attack, "cells": [{**_cell(row.gain), "seed": signed(row.worst_seed)} for row in gains.values()]}
            for attack, gains in found.items()
        ],
    }


def _by_attack(rows: Sequence[Row], fraction: float) -> dict[str, dict[str, Row]]:
    """Return a fraction's rows by attack and rule, those without an attack first."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.rule != BASELINE and (row.fraction == fraction or row.attack == NO_ATTACK):
            found.setdefault(row.attack, {})[row.rule] = row
    return found


def _backdoors(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return the table of backdoors' success: a row for each attack and fraction, a column for each rule.

    The baseline is measured once for each attack, because nobody hostile takes part in it. None without backdoors.
    """
    found = {(row.attack, row.fraction, row.rule): f"{row.success:.0f}" for row in rows if row.success is not None}
    if not found:
        return None
    rules = _rules(rows)
    alone = {attack: shown for (attack, _, rule), shown in found.items() if rule == BASELINE}
    places = dict.fromkeys((attack, fraction) for attack, fraction, rule in found if rule != BASELINE)
    return {
        "headings": ["attack", "hostile", BASELINE, *rules],
        "rows": [
            {
                "cells": [
                    attack,
                    _percent(fraction),
                    alone.get(attack, "–"),
                    *[found.get((attack, fraction, rule), "–") for rule in rules],
                ],
                "best": False,
            }
            for attack, fraction in places
        ],
    }


def _rules(rows: Sequence[Row]) -> list[str]:
    return [rule for rule in dict.fromkeys(row.rule for row in rows) if rule != BASELINE]


def _cell(gain: float) -> dict[str, str]:
    return {"text": signed(gain), "tint": tint(gain)}


def _coloured(gain: float) -> str:
    return f"[{'red' if gain < -1 else 'green' if gain > 0 else 'default'}]{signed(gain)}[/]"


def _percent(fraction: float) -> str:
    return "no attack" if fraction == 0 else f"{100 * fraction:g} %"
